"""Tests of a real gateway's TLS listeners: SDK, curl and raw sockets, and certificate changes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.certificate_authority import Authority
from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import ENV, GatewayProcess, gateway_process, mock_fleet

MODEL = "demo-8b"
MESSAGES: Any = [{"role": "user", "content": "How deep is the reservoir behind the dam?"}]
SOON_S = 20.0
CONFIG = """
version: 1
listeners:
  api:
    port: 0
    tls:
      certificate: tls/server.pem
      key: tls/server.key
      handshake_timeout: {handshake}
      more: [{{certificate: tls/other.pem, key: tls/other.key}}]
      {api}
  admin:
    port: 0
    tls: {{certificate: tls/server.pem, key: tls/server.key}}
observability: {{access_log: 'off'}}
{rest}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
      - {{url: '{1}'}}
"""


class TlsSetup(NamedTuple):
    gateway: GatewayProcess
    authority: Authority
    trust: ssl.SSLContext


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    with mock_fleet() as urls:
        yield urls


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, engines: list[str]) -> Iterator[TlsSetup]:
    yield from start_gateway(
        tmp_path_factory.mktemp("tls"), engines, rest="limits: {slow_reader: 1s, body: 1MiB}"
    )


def start_gateway(
    folder: Path, engines: list[str], api: str = "", rest: str = "", handshake: str = "60s"
) -> Iterator[TlsSetup]:
    authority = Authority(folder / "tls")
    authority.issue("server", "localhost", "127.0.0.1")
    authority.issue("other", "other.example.org", "*.wild.example.org")
    config = CONFIG.format(*engines, api=api, rest=rest, handshake=handshake)
    with gateway_process(folder, config, complete=False) as gateway:
        yield TlsSetup(gateway, authority, ssl.create_default_context(cafile=str(authority.ca)))
        assert "Traceback" not in gateway.stderr_text, gateway.stderr_text


def sdk_client(setup: TlsSetup, trust: ssl.SSLContext | None = None) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=trust or setup.trust)
    return openai.OpenAI(
        base_url=f"{setup.gateway.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=SOON_S,
        http_client=http,
    )


def peer_certificate(
    setup: TlsSetup, server_name: str = "localhost", **context: Any
) -> dict[str, Any]:
    trust = ssl.create_default_context(cafile=str(setup.authority.ca))
    for name, value in context.items():
        setattr(trust, name, value)
    with (
        socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S) as raw,
        trust.wrap_socket(raw, server_hostname=server_name) as line,
    ):
        return {
            **(line.getpeercert() or {}),
            "alpn": line.selected_alpn_protocol(),
            "version": line.version(),
        }


def names_of(certificate: dict[str, Any]) -> list[str]:
    return [name for _, name in certificate["subjectAltName"]]


def test_the_openai_sdk_gets_whole_and_streamed_answers_over_tls(setup: TlsSetup) -> None:
    with sdk_client(setup) as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, stream=True
        )
        streamed = "".join(
            event.choices[0].delta.content or "" for event in stream if event.choices
        )
        models = [
            model.id for model in client.models.list()
        ]  # GET is served by the other HTTP parser
    assert streamed == whole.choices[0].message.content
    assert models == [MODEL]


def test_the_async_sdk_gets_many_streams_at_once_over_tls(setup: TlsSetup) -> None:
    async def read_streams() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(verify=setup.trust)
        async with openai.AsyncOpenAI(
            base_url=f"{setup.gateway.url}/v1", api_key="none", http_client=http
        ) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=64, stream=True
                )
                return "".join(
                    [
                        event.choices[0].delta.content or ""
                        async for event in stream
                        if event.choices
                    ]
                )

            return await asyncio.gather(*(one() for _ in range(16)))

    answers = asyncio.run(read_streams())
    assert len(answers) == 16
    assert set(answers) == {answers[0]}
    assert answers[0]


def test_a_large_body_arrives_complete_over_tls(setup: TlsSetup) -> None:
    text = "water " * 20_000
    with sdk_client(setup) as client:
        usage = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
        ).usage
    assert usage is not None
    assert usage.prompt_tokens > 10_000


def test_curl_reads_models_and_metrics_over_tls(setup: TlsSetup) -> None:
    command = ["curl", "-sS", "--max-time", "20", "--cacert", str(setup.authority.ca)]
    models = subprocess.run(
        [*command, f"{setup.gateway.url}/v1/models"], capture_output=True, text=True, check=True
    )
    assert MODEL in models.stdout
    page = subprocess.run(
        [*command, f"{setup.gateway.admin_url}/metrics"], capture_output=True, text=True, check=True
    )
    assert 'penstock_tls_certificate_not_after_timestamp_seconds{listener="api"}' in page.stdout


def test_a_command_reaches_the_admin_server_over_tls(setup: TlsSetup) -> None:
    command = [sys.executable, "-m", "gateway", "status", "--admin", setup.gateway.admin_url]
    done = subprocess.run(
        [*command, "--ca", str(setup.authority.ca)], capture_output=True, text=True, env=ENV
    )
    assert "2 of 2 endpoints available" in done.stdout, done.stderr


def test_the_health_check_of_the_image_works_with_a_tls_admin_server(setup: TlsSetup) -> None:
    text = (Path(__file__).parents[2] / "deploy" / "docker" / "Dockerfile").read_text()
    (check,) = re.findall(r"HEALTHCHECK.*\\\n +CMD (\[.*\])$", text, re.MULTILINE)
    _, *words = json.loads(check)
    env = ENV | {"PENSTOCK_ADMIN": setup.gateway.admin_url}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_the_server_name_selects_the_certificate(setup: TlsSetup) -> None:
    assert names_of(peer_certificate(setup, "localhost")) == ["localhost", "127.0.0.1"]
    assert names_of(peer_certificate(setup, "other.example.org"))[0] == "other.example.org"
    assert names_of(peer_certificate(setup, "a.wild.example.org"))[0] == "other.example.org"
    assert names_of(peer_certificate(setup, "unknown.example.org", check_hostname=False)) == [
        "localhost",
        "127.0.0.1",
    ]


def test_http_1_1_is_negotiated_and_old_tls_versions_are_refused(setup: TlsSetup) -> None:
    trust = ssl.create_default_context(cafile=str(setup.authority.ca))
    trust.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S) as raw:
        assert (
            trust.wrap_socket(raw, server_hostname="localhost").selected_alpn_protocol()
            == "http/1.1"
        )
    old = ssl.create_default_context(cafile=str(setup.authority.ca))
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S) as raw,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        old.wrap_socket(raw, server_hostname="localhost")


def test_clients_that_complete_no_handshake_are_closed_at_its_timeout(
    tmp_path: Path, engines: list[str]
) -> None:
    # The other tests have a long timeout, because a client without CPU completes no handshake.
    begun = (b"", b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x02\x00")
    for setup in start_gateway(tmp_path, engines, handshake="1s"):
        with ExitStack() as stack:
            clients: list[socket.socket] = []
            for sent in begun:
                line = socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S / 2)
                clients.append(stack.enter_context(line))
                line.sendall(sent)
            assert not any(received_until_closed(line).startswith(b"HTTP") for line in clients)


def received_until_closed(raw: socket.socket) -> bytes:
    # Return what the peer sends until it closes the connection. Raises TimeoutError otherwise.
    data = b""
    with suppress(ConnectionResetError):
        while received := raw.recv(100):
            data += received
    return data


def test_a_failed_handshake_is_logged_with_the_clients_address(setup: TlsSetup) -> None:
    with socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while raw.recv(100):
                pass
    deadline = time.monotonic() + SOON_S
    while "TLS: the handshake of 127.0.0.1 failed: " not in setup.gateway.stderr_text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_many_open_handshakes_do_not_block_another_client(setup: TlsSetup) -> None:
    idle = [socket.create_connection(("127.0.0.1", setup.gateway.port), SOON_S) for _ in range(200)]
    try:
        assert peer_certificate(setup)["version"] == "TLSv1.3"
    finally:
        for connection in idle:
            connection.close()


def test_new_connections_use_a_new_certificate_and_open_streams_continue(setup: TlsSetup) -> None:
    before = peer_certificate(setup)["serialNumber"]
    stop, errors, done = threading.Event(), [], []

    def load() -> None:
        while not stop.is_set():
            try:
                with sdk_client(setup) as client:
                    for _ in range(3):
                        stream = client.chat.completions.create(
                            model=MODEL, messages=MESSAGES, max_tokens=32, stream=True
                        )
                        done.append(sum(1 for _ in stream))
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    with sdk_client(setup) as client:
        client.models.list()  # opens a connection, which stays open
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                setup.authority.issue("server", "localhost", "127.0.0.1")
                before = wait_for_another_certificate(setup, before)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert client.models.list()
    assert errors == []
    assert len(done) > 3


def wait_for_another_certificate(setup: TlsSetup, serial: str) -> str:
    ends = time.monotonic() + SOON_S
    while time.monotonic() < ends:
        current = str(peer_certificate(setup)["serialNumber"])
        if current != serial:
            return current
        time.sleep(0.05)
    raise AssertionError(
        "the gateway did not load the new certificate within the time limit: "
        f"{setup.gateway.stderr_text}"
    )


def test_a_replaced_kubernetes_volume_is_detected(setup: TlsSetup, tmp_path: Path) -> None:
    # Kubernetes replaces the files by renaming the symbolic link `..data`, which they refer to.
    folder = setup.authority.ca.parent
    before = str(peer_certificate(setup)["serialNumber"])
    for number in (1, 2):
        issued = Authority(folder / f"..volume-{number}", setup.authority).issue(
            "server", "localhost", "127.0.0.1"
        )
        link = folder / "..data-new"
        link.symlink_to(issued.key.parent.name)
        link.rename(folder / "..data")
        for name in ("server.pem", "server.key"):
            if not (folder / name).is_symlink():
                (folder / f"{name}.new").symlink_to(Path("..data") / name)
                (folder / f"{name}.new").rename(folder / name)
        before = wait_for_another_certificate(setup, before)


def tls_connection(setup: TlsSetup, receive_bytes: int | None = None) -> ssl.SSLSocket:
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(PATIENCE_S)
    raw.connect(("127.0.0.1", setup.gateway.port))
    return setup.trust.wrap_socket(raw, server_hostname="localhost")


def test_a_body_refusal_arrives_while_the_client_still_sends(setup: TlsSetup) -> None:
    body = b"x" * (3 << 20)
    with tls_connection(setup) as line:
        line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n")
        line.sendall(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        line.sendall(body)
        answer = b""
        with suppress(OSError):  # the gateway closes the connection
            while data := line.recv(65536):
                answer += data
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(text)["error"]


def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(setup: TlsSetup) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16_000, "stream": True}
    body = json.dumps(request).encode()
    with tls_connection(setup, receive_bytes=4096) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        )
        line.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        with sdk_client(setup) as client:
            assert client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=2
            ).choices
        ends = time.monotonic() + PATIENCE_S
        while open_connections(setup) > 0 and time.monotonic() < ends:
            time.sleep(0.05)
        assert open_connections(setup) == 0, setup.gateway.stderr_text
        answer = b""
        with suppress(OSError):  # unread data is lost with a reset
            while data := line.recv(65536):
                answer += data
    assert b"[DONE]" not in answer


def open_connections(setup: TlsSetup) -> float:
    with openai.DefaultHttpxClient(base_url=setup.gateway.admin_url, verify=setup.trust) as admin:
        (value,) = re.findall(
            r"^penstock_connections (\S+)$", admin.get("/metrics").text, re.MULTILINE
        )
    return float(value)


def test_a_broken_certificate_file_is_reported_and_the_old_one_stays_in_use(
    setup: TlsSetup,
) -> None:
    before = peer_certificate(setup)["serialNumber"]
    file = setup.authority.ca.with_name("server.pem")
    good = file.read_bytes()
    file.write_bytes(b"no certificate")
    admin = openai.DefaultHttpxClient(base_url=setup.gateway.admin_url, verify=setup.trust)
    ends = time.monotonic() + SOON_S
    while (error := admin.get("/config").json()["last_error"]) is None and time.monotonic() < ends:
        time.sleep(0.05)
    assert "listeners.api.tls.certificate" in error["problems"][0]["text"]
    assert peer_certificate(setup)["serialNumber"] == before
    file.write_bytes(good)
    while admin.get("/config").json()["last_error"] is not None and time.monotonic() < ends:
        time.sleep(0.05)
    assert admin.get("/config").json()["last_error"] is None


def test_status_names_an_expired_certificate_and_the_valid_one_stays_in_use(
    setup: TlsSetup,
) -> None:
    serial = peer_certificate(setup, "other.example.org")["serialNumber"]
    setup.authority.issue("other", "other.example.org", expired=True)
    command = [sys.executable, "-m", "gateway", "status", "--admin", setup.gateway.admin_url]
    done = subprocess.run(
        [*command, "--ca", str(setup.authority.ca)], capture_output=True, text=True, env=ENV
    )
    assert "listeners.api.tls.more[0].certificate" in done.stdout
    assert "other.pem expired on 2020-01-02" in done.stdout
    ends = time.monotonic() + PATIENCE_S
    while (
        "the certificate in use is kept" not in setup.gateway.stderr_text
        and time.monotonic() < ends
    ):
        time.sleep(0.05)
    assert "the certificate in use is kept" in setup.gateway.stderr_text
    assert peer_certificate(setup, "other.example.org")["serialNumber"] == serial
    setup.authority.issue("other", "other.example.org", "*.wild.example.org")


def test_a_listener_with_a_client_ca_refuses_clients_without_a_certificate(
    tmp_path: Path, engines: list[str]
) -> None:
    for setup in start_gateway(tmp_path, engines, api="client_ca: tls/ca.pem"):
        with sdk_client(setup) as client, pytest.raises(openai.APIConnectionError):
            client.models.list()
        own = setup.authority.issue("client", "client.example.org")
        trust = ssl.create_default_context(cafile=str(setup.authority.ca))
        trust.load_cert_chain(own.certificate, own.key)
        with sdk_client(setup, trust) as client:
            assert [model.id for model in client.models.list()] == [MODEL]


def test_workers_serve_over_tls_and_switch_to_a_new_certificate(
    tmp_path: Path, engines: list[str]
) -> None:
    for setup in start_gateway(tmp_path, engines, rest="workers: 2"):
        with sdk_client(setup) as client:
            assert client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=2
            ).choices
        with openai.DefaultHttpxClient(verify=setup.trust) as admin:
            assert admin.get(f"{setup.gateway.admin_url}/readyz").status_code == 200
        before = peer_certificate(setup)["serialNumber"]
        setup.authority.issue("server", "localhost", "127.0.0.1")
        wait_for_another_certificate(setup, str(before))
