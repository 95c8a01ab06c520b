"""Tests of engines with https:// URLs and a path prefix. Both sides verify certificates."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.certificate_authority import Authority
from tests.e2e.processes import ENV, complete_config, gateway_process
from tests.e2e.recording_engine import MODEL, TEXT, RecordingEngine, recording_engine
from tests.e2e.shared_fleet import wait_until

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CONFIG = """
models: [{{name: demo, pool: main}}]
pools:
  main:
    endpoints:
      - url: '{url}/some/prefix/'
        tls: {{{tls}}}
"""
OWN = "ca: ca.pem, certificate: penstock.pem, key: penstock.key, server_name: engine.example.org"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    issuer = Authority(tmp_path)
    issuer.issue("engine", "engine.example.org")
    issuer.issue("penstock", "penstock.example.org")
    return issuer


def engine_context(
    authority: Authority,
    *,
    requires_client_certificate: bool = True,
    names: list[str | None] | None = None,
) -> ssl.SSLContext:
    # Return the TLS context of an engine, which appends requested server names to `names`.
    #
    # requires_client_certificate    whether to require a client certificate
    folder = authority.ca.parent
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.load_cert_chain(folder / "engine.pem", folder / "engine.key")
    context.verify_mode = ssl.CERT_REQUIRED if requires_client_certificate else ssl.CERT_NONE
    if names is not None:
        context.sni_callback = lambda connection, name, own: names.append(name)
    return context


def ask(url: str, **options: Any) -> str | None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
        if options.get("stream"):
            return " ".join(event.choices[0].delta.content or "" for event in answer)
        return answer.choices[0].message.content


def endpoints(admin_url: str) -> Any:
    with urllib.request.urlopen(f"{admin_url}/endpoints") as answer:
        return json.load(answer)["endpoints"]


def mirrored_requests(admin_url: str) -> dict[str, int]:
    # Return the numbers of sampled requests of the only mirror, by result.
    with urllib.request.urlopen(f"{admin_url}/mirror") as answer:
        counts: dict[str, int] = json.load(answer)["mirrors"][0]["requests"]
    return counts


def prefixed_gets(engine: RecordingEngine) -> set[str]:
    return {
        path.removeprefix("/some/prefix")
        for path in engine.gets
        if path.startswith("/some/prefix/")
    }


def test_requests_and_probes_use_tls_and_the_prefix(tmp_path: Path, authority: Authority) -> None:
    names: list[str | None] = []
    with recording_engine(engine_context(authority, names=names)) as engine:
        with gateway_process(tmp_path, CONFIG.format(url=engine.url, tls=OWN)) as running:
            assert ask(running.url) == TEXT
            assert ask(running.url, stream=True).split() == TEXT.split()  # type: ignore[union-attr]
            assert [endpoint["state"] for endpoint in endpoints(running.admin_url)] == ["up"]
        assert {request.line for request in engine.requests} == {
            "POST /some/prefix/v1/chat/completions HTTP/1.1"
        }
        assert {"/health", "/v1/models", "/metrics"} <= prefixed_gets(engine)
        assert {path for path in engine.gets if not path.startswith("/some/prefix/")} == set()
        assert set(names) == {"engine.example.org"}


@pytest.mark.parametrize(
    "tls", ["ca: ca.pem", "server_name: engine.example.org"], ids=["name", "authority"]
)
def test_an_engine_that_cannot_prove_its_identity_gets_no_request(
    tmp_path: Path, authority: Authority, tls: str
) -> None:
    with recording_engine(engine_context(authority, requires_client_certificate=False)) as engine:
        with (
            gateway_process(tmp_path, CONFIG.format(url=engine.url, tls=tls)) as running,
            pytest.raises(openai.APIStatusError),
        ):
            ask(running.url)
        assert (engine.requests, engine.gets) == ([], set())


def test_verify_false_serves_and_check_warns_about_it(tmp_path: Path, authority: Authority) -> None:
    with recording_engine(engine_context(authority, requires_client_certificate=False)) as engine:
        config = CONFIG.format(url=engine.url, tls="verify: false")
        with gateway_process(tmp_path, config) as running:
            assert ask(running.url) == TEXT
    (tmp_path / "check.yaml").write_text(complete_config(config))
    command = [sys.executable, "-m", "gateway", "check", str(tmp_path / "check.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
    assert "tls.verify" in checked.stdout + checked.stderr


def test_doctor_examines_an_engine_over_tls(tmp_path: Path, authority: Authority) -> None:
    file = tmp_path / "doctor.yaml"
    with recording_engine(engine_context(authority)) as engine:
        file.write_text(complete_config(CONFIG.format(url=engine.url, tls=OWN)))
        command = [sys.executable, "-m", "gateway", "doctor", "--config", str(file), "--json"]
        completed = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
        assert {"/health", "/v1/models"} <= prefixed_gets(engine), (
            completed.stdout + completed.stderr
        )


def test_a_mirrored_engine_is_verified_by_its_configured_server_name(
    tmp_path: Path, authority: Authority
) -> None:
    with recording_engine(engine_context(authority)) as engine:
        text = CONFIG.format(url=engine.url, tls=OWN)
        text += f"""    mirror: {{to: candidate, percent: 100}}
  candidate:
    endpoints: [{{url: '{engine.url}/candidate', tls: {{{OWN}}}}}]
"""
        with gateway_process(tmp_path, text) as running:
            ask(running.url)
            wait_until(lambda: any(mirrored_requests(running.admin_url).values()))
            assert mirrored_requests(running.admin_url) == {"compared": 1}
