"""Tests that all workers return to the old configuration if requests fail with the new one."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
from tests.e2e.shared_fleet import wait_until

BODY = json.dumps({"model": "demo-8b", "max_tokens": 2, "prompt": "hello"}).encode()
ROLLBACK = "reload: {auto_rollback: {window: 600s, error_ratio: 0.2, requests: 12}}\n"


class BrokenEngine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "demo-8b"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(500, {"error": {"message": "broken"}})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def broken_engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BrokenEngine) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def call(url: str, method: str, body: bytes | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(running: GatewayProcess) -> int:
    return call(f"{running.url}/v1/completions", "POST", BODY)[0]


def test_a_change_that_makes_requests_fail_is_rolled_back_in_all_workers(
    tmp_path: Path, broken_engine: str
) -> None:
    with mock_fleet() as (good, *_):
        text = f"workers: 2\n{ROLLBACK}pools: {{main: {{endpoints: [{{url: '{good}'}}]}}}}\n"
        with gateway_process(tmp_path, text) as running:
            assert [ask(running) for _ in range(24)] == [200] * 24
            worse = (tmp_path / "gateway.yaml").read_text().replace(good, broken_engine)
            assert call(f"{running.admin_url}/config", "PUT", worse.encode())[0] == 200
            wait_until(lambda: ask(running) >= 500)

            def is_rolled_back() -> bool:
                ask(running)
                endpoints = call(f"{running.admin_url}/endpoints", "GET")[1]["endpoints"]
                return {
                    endpoint["url"] for endpoint in endpoints if endpoint["state"] != "leaving"
                } == {good}

            wait_until(is_rolled_back)
            wait_until(lambda: [ask(running) for _ in range(12)] == [200] * 12)
            assert "v2 increased failures" in running.stderr_text
