"""Tests that nginx and HAProxy, with the shipped configurations, do not delay streams of a
gateway.
"""

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
every_proxy = pytest.mark.parametrize("kind", KINDS)
every_http = pytest.mark.parametrize("version", ["--http1.1", "--http2"])


class House(NamedTuple):
    gateway: GatewayProcess
    ports: dict[str, int]

    def url(self, kind: str) -> str:
        return f"https://127.0.0.1:{self.ports[kind]}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
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
                yield House(started, {"nginx": nginx, "haproxy": haproxy})


def curl(url: str, *options: str, tokens: int = TOKENS) -> list[str]:
    asked = {"model": "demo-8b", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": "Tell me of rivers"}]})
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


def arrivals(command: list[str]) -> list[float]:
    # Run a command that reads a stream; return when each token arrived, in seconds.
    #
    # Asserts that the stream ends regularly.
    came, last = [], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("data: {") and '"content":""' not in line:
                came.append(monotonic())
            last = line.strip() or last
    assert process.returncode == 0
    assert last == "data: [DONE]"
    return came


def gaps(came: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(came)]


@every_http
@every_proxy
def test_tokens_of_a_stream_arrive_one_by_one(house: House, kind: str, version: str) -> None:
    direct = arrivals(curl(house.gateway.url))
    through = arrivals(curl(house.url(kind), version))
    assert len(through) == len(direct) >= TOKENS
    pace, seen = statistics.median(gaps(direct)), statistics.median(gaps(through))
    assert pace > 0.01, "the TP group is too quick to tell a token from a heap"
    assert seen > pace / 2
    assert through[-1] - through[0] > (direct[-1] - direct[0]) * 0.7


def in_flight(house: House) -> int:
    with urllib.request.urlopen(f"{house.gateway.admin_url}/endpoints", timeout=WITHIN_S) as answer:
        return int(sum(each["in_flight"] for each in json.load(answer)["endpoints"]))


def until(house: House, wanted: int, within_s: float) -> bool:
    ends = monotonic() + within_s
    while in_flight(house) != wanted:
        if monotonic() > ends:
            return False
        sleep(0.02)  # another process cannot signal this one
    return True


@every_http
@every_proxy
def test_a_client_that_leaves_ends_its_request_at_the_tp_group(
    house: House, kind: str, version: str
) -> None:
    assert until(house, 0, WITHIN_S)
    with subprocess.Popen(
        curl(house.url(kind), version, tokens=2000), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        assert in_flight(house) == 1
        process.kill()
    assert until(house, 0, 2.0), "2,000 tokens take a minute here: the request went on for nobody"


@every_proxy
def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(
    house: House, kind: str, tmp_path: Path
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
    said = subprocess.run(
        [*command, f"{house.url(kind)}/v1/chat/completions"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    status, uploaded = said.stdout.split()
    assert status == "413"
    assert int(uploaded) < 8 << 20


@every_proxy
@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/v2/embed", "/score", "/tokenize"])
def test_paths_of_the_api_outside_v1_reach_the_gateway(house: House, kind: str, path: str) -> None:
    command = ["curl", "--silent", "--insecure", "--data", "{}", house.url(kind) + path]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    assert "model" in json.loads(answer.stdout)["error"]["message"]


@every_proxy
@pytest.mark.parametrize("path", ["/metrics", "/config", "/endpoints", "/healthz", "/"])
def test_nothing_but_the_api_is_there(house: House, kind: str, path: str) -> None:
    command = [
        "curl",
        "--silent",
        "--insecure",
        "--write-out",
        "%{http_code}",
        "--output",
        "/dev/null",
    ]
    said = subprocess.run(
        [*command, house.url(kind) + path], capture_output=True, text=True, timeout=WITHIN_S
    )
    assert said.stdout == "404"


class HeaderRecorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    heard: list[dict[str, str]]

    def do_GET(self) -> None:
        if not self.path.startswith("/readyz"):
            self.heard.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@every_proxy
def test_what_a_client_says_of_its_own_address_is_not_passed_on(kind: str, tmp_path: Path) -> None:
    ear = type("OneEar", (HeaderRecorder,), {"heard": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), ear) as server:
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
    assert [heard["x-forwarded-for"] for heard in ear.heard] == ["127.0.0.1"]
