"""Tests of admin commands over TLS: certificates on both sides, and hints in error messages."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from command_line import UsageError, parameters_of
from gateway.cli import main
from gateway.cli.admin_client import AdminAddress, AdminClient, AdminServerError
from gateway.cli.commands import command_function
from tests.certificate_authority import Authority
from tests.command_runner import CommandRunner

REACHED = "is not the admin server of a gateway (status 404)"
COMMANDS = (
    "status",
    "reload",
    "diff",
    "plan",
    "rollback",
    "history",
    "drain",
    "undrain",
    "top",
    "explain",
    "chaos",
)


class AnyServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


class TlsServer(ThreadingHTTPServer):
    """A test server that accepts TLS in each connection's thread.

    Failed handshakes do not stop it.
    """

    context: ssl.SSLContext

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request = self.context.wrap_socket(request, server_side=True)
        except OSError:
            request.close()
            return
        super().process_request_thread(request, client_address)

    def handle_error(self, *_: object) -> None:
        """Ignore the errors of clients that refuse the certificate and close the connection."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls"))
    made.issue("server", "127.0.0.1")
    made.issue("client", "operator.example.org")
    made.issue("other", "other.example.org")
    return made


@contextmanager
def served(authority: Authority, *, asks: bool = False) -> Iterator[str]:
    folder = authority.ca.parent
    with TlsServer(("127.0.0.1", 0), AnyServer) as server:
        server.context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca)
        )
        server.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        server.context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    with served(authority) as address:
        yield address


def printed(*words: str, env: dict[str, str] | None = None) -> str:
    done = CommandRunner().invoke(main.run, [*words], env=env)
    assert done.exit_code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return " ".join(done.output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_admin_command_has_the_tls_options(name: str) -> None:
    command = command_function(name)
    options = {option for parameter in parameters_of(command) for option in parameter.on}
    assert {"--admin", "--ca", "--cert", "--key", "--insecure"} <= options
    assert command.__doc__


def test_a_certificate_of_the_given_ca_is_accepted(url: str, authority: Authority) -> None:
    assert REACHED in printed("status", "--admin", url, "--ca", str(authority.ca))
    assert REACHED in printed(
        "status", env={"PENSTOCK_ADMIN": url, "PENSTOCK_ADMIN_CA": str(authority.ca)}
    )


def test_a_certificate_of_an_unknown_ca_is_refused_with_a_hint(url: str) -> None:
    output = printed("status", "--admin", url)
    assert "CERTIFICATE_VERIFY_FAILED" in output
    assert "--ca" in output


def test_insecure_accepts_any_certificate(url: str) -> None:
    assert REACHED in printed("status", "--admin", url, "--insecure")


def test_a_client_certificate_is_sent_to_a_server_that_requires_one(authority: Authority) -> None:
    folder = authority.ca.parent
    own = ["--cert", str(folder / "client.pem"), "--key", str(folder / "client.key")]
    with served(authority, asks=True) as url:
        asked = ["status", "--admin", url, "--ca", str(authority.ca)]
        assert "cannot reach a gateway" in printed(*asked)
        assert REACHED in printed(*asked, *own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ca", "none.pem"], "--ca none.pem: none.pem cannot be read: No such file or directory"),
        (
            ["--cert", "{0}/client.pem", "--key", "{0}/other.key"],
            "other.key: does not belong to the certificate",
        ),
        (["--cert", "{0}/client.pem"], "--cert and --key must be given together"),
    ],
    ids=str,
)
def test_unusable_tls_files_are_named(
    url: str, authority: Authority, words: list[str], message: str
) -> None:
    folder = str(authority.ca.parent)
    assert message in printed("status", "--admin", url, *(word.format(folder) for word in words))


@pytest.mark.parametrize("words", [["--insecure"], ["--ca", "ca.pem"]], ids=str)
def test_tls_options_with_an_http_url_are_wrong_usage(words: list[str]) -> None:
    done = CommandRunner().invoke(main.run, ["status", "--admin", "http://127.0.0.1:1", *words])
    assert done.exit_code == 2
    assert "https://" in done.output


def test_a_url_with_the_wrong_scheme_has_a_hint(url: str) -> None:
    assert "the URL begins with https://" in printed(
        "status", "--admin", url.replace("https", "http")
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), AnyServer) as plain:
        threading.Thread(target=plain.serve_forever, args=(0.01,), daemon=True).start()
        output = printed(
            "status", "--admin", f"https://127.0.0.1:{plain.server_port}", "--insecure"
        )
        plain.shutdown()
    assert "begins with http://" in output


def test_an_encrypted_key_does_not_prompt_for_its_password(
    url: str, authority: Authority, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    folder = authority.ca.parent
    key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
    sealed = tmp_path / "sealed.key"
    word = serialization.BestAvailableEncryption(b"word")
    sealed.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, word)
    )
    output = printed(
        "status", "--admin", url, "--cert", str(folder / "client.pem"), "--key", str(sealed)
    )
    assert "key_password does not decrypt it" in output


class PathRecorder(AnyServer):
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        super().do_GET()


def test_the_path_of_the_admin_url_precedes_every_request() -> None:
    handler = type("Handler", (PathRecorder,), {"paths": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/penstock/"
        client = AdminClient(AdminAddress(url), None)
        with pytest.raises(AdminServerError):
            client.try_request("GET", "/status")
        with pytest.raises(AdminServerError):
            next(client.stream("/live/events"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert handler.paths == ["/penstock/status", "/penstock/live/events"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:8081/?x=1", "http://127.0.0.1:8081/#status"])
def test_an_admin_url_with_a_query_or_fragment_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a valid URL; an example is"):
        AdminClient(AdminAddress(url), None)
