"""Tests of TLS settings: error messages for unusable certificate files, and the SSL contexts."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, LoadedConfig, load_with_warnings
from gateway.config.diff import diff
from gateway.config.tls_file_rules import named_certificates
from gateway.config.tls_sections import ListenerTls
from gateway.http.connection_limits import ClientConnections
from gateway.http.tls_listener import TlsListener, TlsListeners
from gateway.reload.reloader import _bound
from gateway.util.certificate_files import KeyPair, certificate_validity
from gateway.util.tls_contexts import ServerSettings, server_context
from tests.certificate_authority import Authority, Files
from tests.replacement import stand_in

JANUARY_2020 = 1577836800.0

CONFIG = """version: 1
listeners:
  api:
    tls:
      certificate: {certificate}
      key: {key}
{more}pools:
  main:
    endpoints:
      - url: http://a:1
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def good(authority: Authority) -> Files:
    return authority.issue("server", "localhost")


def written(
    folder: Path, certificate: str = "server.pem", key: str = "server.key", more: str = ""
) -> Path:
    file = folder / "penstock.yaml"
    file.write_text(CONFIG.format(certificate=certificate, key=key, more=more))
    return file


def problems(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_with_warnings(file, {})
    return [
        f"{problem.line}:{problem.col} {problem.path} {problem.message}"
        for problem in caught.value.problems
    ]


def test_relative_paths_start_at_the_folder_of_the_configuration(
    tmp_path: Path, good: Files
) -> None:
    section = load_with_warnings(written(tmp_path), {}).config.listeners.api.tls
    assert section is not None
    assert (section.certificate, section.key) == (str(good.certificate), str(good.key))


def test_a_missing_file_is_an_error_at_its_line_and_column(tmp_path: Path, good: Files) -> None:
    result = problems(written(tmp_path, certificate="none.pem"))
    assert len(result) == 1
    assert result[0].startswith("5:20 listeners.api.tls.certificate ")
    assert result[0].endswith("none.pem cannot be read: No such file or directory")


@pytest.mark.usefixtures("good")
def test_a_key_of_another_certificate_is_an_error(tmp_path: Path, authority: Authority) -> None:
    authority.issue("other", "localhost")
    result = problems(written(tmp_path, key="other.key"))
    assert result == ["6:12 listeners.api.tls.key does not belong to the certificate"]


def test_an_expired_certificate_is_a_warning_with_its_date(
    tmp_path: Path, authority: Authority
) -> None:
    authority.issue("server", "localhost", expired=True)
    (warning,) = load_with_warnings(written(tmp_path), {}).warnings
    message = "expired on 2020-01-02 00:00 UTC; its peers refuse it"
    assert (warning.line, warning.col, warning.path) == (5, 20, "listeners.api.tls.certificate")
    assert warning.message == message


def test_certificates_are_listed_with_their_expiry_and_problems(
    tmp_path: Path, authority: Authority
) -> None:
    authority.issue("server", "localhost", expired=True)
    config = load_with_warnings(written(tmp_path), {}).config
    (result,) = named_certificates(config, JANUARY_2020 + 60)
    assert (result.path, result.file) == (
        "listeners.api.tls.certificate",
        str(tmp_path / "server.pem"),
    )
    assert (result.not_after, result.refusal_reason) == (JANUARY_2020 + 86400, None)
    (early,) = named_certificates(config, JANUARY_2020 - 1)
    assert early.refusal_reason == "is not valid before 2020-01-01 00:00 UTC; its peers refuse it"
    (late,) = named_certificates(config, JANUARY_2020 + 86401)
    assert late.refusal_reason == "expired on 2020-01-02 00:00 UTC; its peers refuse it"


def listener(file: Path) -> tuple[TlsListener, Callable[[], None]]:
    def section() -> ListenerTls:
        result = load_with_warnings(file, {}).config.listeners.api.tls
        assert result is not None
        return result

    tls_listener = TlsListener(section(), asyncio.Protocol, 1.0, lambda: None)
    return tls_listener, lambda: tls_listener.update(section())


def test_a_listener_starts_with_an_expired_certificate_and_logs_its_date(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    authority.issue("server", "localhost", expired=True)
    tls_listener, follow = listener(written(tmp_path))
    assert tls_listener.not_after == JANUARY_2020 + 86400
    assert "server.pem expired on 2020-01-02" in caplog.text
    authority.issue("server", "localhost")
    follow()
    assert tls_listener.not_after > time.time()


def test_a_valid_certificate_is_not_replaced_by_an_expired_one(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    authority.issue("server", "localhost")
    tls_listener, follow = listener(written(tmp_path))
    before = tls_listener.not_after
    authority.issue("server", "localhost", expired=True)
    follow()
    assert tls_listener.not_after == before
    assert "the certificate in use is kept: the new certificate has expired" in caplog.text


@pytest.mark.usefixtures("good")
def test_files_with_other_content_are_errors(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("text")
    assert problems(written(tmp_path, certificate="text.pem")) == [
        "5:20 listeners.api.tls.certificate holds no certificate in PEM form"
    ]
    assert problems(written(tmp_path, key="text.pem")) == [
        "6:12 listeners.api.tls.key is not a private key in PEM form, "
        "or key_password does not decrypt it"
    ]
    assert problems(written(tmp_path, more="      client_ca: text.pem\n")) == [
        "7:18 listeners.api.tls.client_ca holds no certificate in PEM form"
    ]


@pytest.mark.usefixtures("good")
def test_unknown_ciphers_are_an_error(tmp_path: Path) -> None:
    result = problems(written(tmp_path, more="      ciphers: NONE-SUCH\n"))
    assert result == [
        "7:16 listeners.api.tls.ciphers OpenSSL knows none of these ciphers; use names that `openssl ciphers` lists"
    ]


@pytest.mark.usefixtures("good")
def test_a_replaced_file_is_a_change_without_restart(tmp_path: Path, authority: Authority) -> None:
    before = load_with_warnings(written(tmp_path), {})
    authority.issue("server", "localhost")
    after = load_with_warnings(written(tmp_path), {})
    assert before.digest != after.digest
    result = diff(before, after)
    assert [str(item) for item in result] == [
        "listeners.api.tls.certificate: server.pem has another value now",
        "listeners.api.tls.key: server.key has another value now",
    ]
    assert _bound(result) == ()


@pytest.mark.usefixtures("good")
def test_enabling_or_disabling_tls_needs_a_restart(tmp_path: Path) -> None:
    encrypted = load_with_warnings(written(tmp_path), {})
    file = tmp_path / "plain.yaml"
    file.write_text("version: 1\npools: {main: {endpoints: [{url: 'http://a:1'}]}}\n")
    assert _bound(diff(encrypted, load_with_warnings(file, {}))) == ("listeners.api.tls",)


def test_missing_files_are_watched_too(tmp_path: Path, good: Files) -> None:
    assert {good.certificate, good.key} <= set(load_with_warnings(written(tmp_path), {}).references)
    with pytest.raises(ConfigError) as caught:
        load_with_warnings(written(tmp_path, key="none.key"), {})
    assert tmp_path / "none.key" in caught.value.references


def test_a_key_password_is_used_and_never_shown(tmp_path: Path, good: Files) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(good.key.read_bytes(), None)
    sealed = serialization.BestAvailableEncryption(b"open sesame")
    good.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed)
    )
    assert problems(written(tmp_path)) == [
        "6:12 listeners.api.tls.key is not a private key in PEM form, "
        "or key_password does not decrypt it"
    ]
    file = written(tmp_path, more="      key_password: ${WORD}\n")
    loaded = load_with_warnings(file, {"WORD": "open sesame"})
    assert "sesame" not in repr(loaded)
    assert "sesame" not in repr(
        loaded.config.listeners.api.tls and loaded.config.listeners.api.tls.settings
    )


def test_the_validity_period_is_that_of_the_certificate(authority: Authority) -> None:
    files = authority.issue("old", "old.example.org", "*.old.example.org", expired=True)
    times = certificate_validity(KeyPair(str(files.certificate), str(files.key)))
    assert times.not_after - times.not_before == 86400
    assert times.names == ("old.example.org", "*.old.example.org")


def test_a_listener_accepts_tls_1_2_and_later_with_forward_secrecy_only(good: Files) -> None:
    pair = KeyPair(str(good.certificate), str(good.key))
    context = server_context(ServerSettings((pair,)))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    old = [item["name"] for item in context.get_ciphers() if item["protocol"] != "TLSv1.3"]
    assert old
    assert all(name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name) for name in old)


@pytest.mark.parametrize(
    ("tail", "path"),
    [("      - {url: 'https://a', tls: {verify: false}}\n", "pools.main.endpoints[0].tls.verify")],
)
def test_disabled_verification_causes_a_warning(tmp_path: Path, tail: str, path: str) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"version: 1\npools:\n  main:\n    endpoints:\n{tail}")
    loaded: LoadedConfig = load_with_warnings(file, {})
    assert [warning.path for warning in loaded.warnings] == [path]


def test_a_plain_listener_uses_its_http_protocols_directly() -> None:
    nothing: Any = None
    connections = stand_in(ClientConnections, nothing)
    assert (
        TlsListeners(connections, nothing, nothing).wrap_factory("api", None, asyncio.Protocol)
        is asyncio.Protocol
    )


def test_tls_of_an_endpoint_needs_an_https_url(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "version: 1\npools:\n  main:\n    endpoints:\n"
        "      - {url: 'http://a', tls: {verify: false}}\n"
    )
    assert problems(file) == [
        "5:9 pools.main.endpoints[0] tls requires a url that begins with https://"
    ]
