"""nginx and HAProxy with the shipped files in front of a gateway and a mock TP group."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import pytest

from tests.deploy.proxies import KINDS, proxy
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet

TOKENS = 24
WITHIN_S = 20.0
with_every_proxy = pytest.mark.parametrize("kind", KINDS)
with_every_http = pytest.mark.parametrize("version", ["--http1.1", "--http2"])


class ProxiedGateway(NamedTuple):
    """A gateway with a mock group that takes about 30 ms per token, and the proxies' ports."""

    gateway: GatewayProcess
    ports: dict[str, int]

    def url(self, kind: str) -> str:
        return f"https://127.0.0.1:{self.ports[kind]}"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedGateway]:
    folder = tmp_path_factory.mktemp("house")
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    with mock_fleet("--speed", "0.2", "--model", "demo-8b") as urls:
        config = f"pools: {{chat: {{endpoints: [{{url: '{urls[0]}'}}]}}}}\n"
        with gateway_process(folder, config) as started:
            admin = int(started.admin_url.rpartition(":")[2])
            with (
                proxy("nginx", folders["nginx"], started.port, admin) as nginx,
                proxy("haproxy", folders["haproxy"], started.port, admin) as haproxy,
            ):
                yield ProxiedGateway(started, {"nginx": nginx, "haproxy": haproxy})


def curl(url: str, *options: str, tokens: int = TOKENS) -> list[str]:
    options_of_body = {"model": "demo-8b", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    messages = [{"role": "user", "content": "Tell me about rivers"}]
    body = json.dumps(options_of_body | {"messages": messages})
    return [
        "curl",
        "--silent",
        "--no-buffer",
        "--insecure",
        *options,
        f"{url}/v1/chat/completions",
        "--data",
        body,
    ]


def token_times(command: list[str]) -> list[float]:
    """Read a stream to its regular end and return the arrival times of its tokens in seconds."""
    times, last = [], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("data: {") and '"content":""' not in line:
                times.append(monotonic())
            last = line.strip() or last
    assert process.returncode == 0
    assert last == "data: [DONE]"
    return times


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@with_every_http
@with_every_proxy
def test_tokens_of_a_stream_arrive_one_by_one(
    proxied: ProxiedGateway, kind: str, version: str
) -> None:
    direct = token_times(curl(proxied.gateway.url))
    through = token_times(curl(proxied.url(kind), version))
    assert len(through) == len(direct) >= TOKENS
    direct_s, through_s = statistics.median(gaps(direct)), statistics.median(gaps(through))
    assert direct_s > 0.01, "the mock group is too fast to detect buffering"
    assert through_s > direct_s / 2
    assert through[-1] - through[0] > (direct[-1] - direct[0]) * 0.7


def in_flight(proxied: ProxiedGateway) -> int:
    with urllib.request.urlopen(
        f"{proxied.gateway.admin_url}/endpoints", timeout=WITHIN_S
    ) as answer:
        return int(sum(endpoint["in_flight"] for endpoint in json.load(answer)["endpoints"]))


def wait_for_in_flight(proxied: ProxiedGateway, wanted: int, within_s: float) -> bool:
    ends = monotonic() + within_s
    while in_flight(proxied) != wanted:
        if monotonic() > ends:
            return False
        sleep(0.02)
    return True


@with_every_http
@with_every_proxy
def test_a_client_that_disconnects_ends_its_request_at_the_tp_group(
    proxied: ProxiedGateway, kind: str, version: str
) -> None:
    assert wait_for_in_flight(proxied, 0, WITHIN_S)
    with subprocess.Popen(
        curl(proxied.url(kind), version, tokens=2000), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        assert in_flight(proxied) == 1
        process.kill()
    assert wait_for_in_flight(proxied, 0, 2.0), (
        "the request of 2,000 tokens, a minute, has continued"
    )


@with_every_proxy
def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(
    proxied: ProxiedGateway, kind: str, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((32 << 20) + 1)
    command = [
        "curl",
        "--silent",
        "--insecure",
        "--http1.1",
        "--write-out",
        "%{http_code} %{size_upload}",
        "--output",
        "/dev/null",
    ]
    command += [
        "-H",
        "Expect: 100-continue",
        "--expect100-timeout",
        "5",
        "--data-binary",
        f"@{large}",
    ]
    result = subprocess.run(
        [*command, f"{proxied.url(kind)}/v1/chat/completions"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    status, uploaded = result.stdout.split()
    assert status == "413"
    assert int(uploaded) < 8 << 20


@with_every_proxy
@pytest.mark.parametrize("path", ["/metrics", "/config", "/endpoints", "/healthz", "/"])
def test_only_the_api_is_reachable(proxied: ProxiedGateway, kind: str, path: str) -> None:
    command = [
        "curl",
        "--silent",
        "--insecure",
        "--write-out",
        "%{http_code}",
        "--output",
        "/dev/null",
    ]
    result = subprocess.run(
        [*command, proxied.url(kind) + path], capture_output=True, text=True, timeout=WITHIN_S
    )
    assert result.stdout == "404"


class HeaderRecorder(BaseHTTPRequestHandler):
    """A server that answers 200 to every request and records its headers."""

    protocol_version = "HTTP/1.1"
    requests: list[dict[str, str]]

    def do_GET(self) -> None:
        if not self.path.startswith("/readyz"):
            self.requests.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Suppress the log."""


@with_every_proxy
def test_a_forwarded_address_of_the_client_is_replaced(kind: str, tmp_path: Path) -> None:
    recorder = type("Recorder", (HeaderRecorder,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), recorder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with proxy(kind, tmp_path, server.server_port, server.server_port) as port:
            command = [
                "curl",
                "--silent",
                "--insecure",
                "--http1.1",
                "-H",
                "X-Forwarded-For: 10.9.8.7",
            ]
            subprocess.run(
                [*command, f"https://127.0.0.1:{port}/v1/models"], check=True, timeout=WITHIN_S
            )
        server.shutdown()
    assert [headers["x-forwarded-for"] for headers in recorder.requests] == ["127.0.0.1"]
