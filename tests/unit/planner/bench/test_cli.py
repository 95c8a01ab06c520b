"""Tests of the command line of `penstock bench`: durations, exit codes, JSON output."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from command_line import UsageError
from planner.bench.cli import bench, duration_s
from tests.command_runner import CommandRunner, program

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
STREAM = TOKEN + TOKEN + b"data: [DONE]\n\n"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(b'{"data":[{"id":"stub"}]}', "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send(STREAM, "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def type_in(*words: str) -> tuple[int, str, str]:
    result = CommandRunner().invoke(program(bench), words)
    return result.exit_code, result.stdout, result.stderr


def test_json_on_standard_output_and_in_the_file_are_the_same(url: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    code, stdout, _ = type_in(
        "--url", url, "--requests", "3", "--concurrency", "1", "--json", "--out", str(out)
    )
    assert code == 0
    assert json.loads(stdout) == json.loads(out.read_text())
    assert json.loads(stdout)["completed"] == 3


def test_the_table_has_percentiles_goodput_and_counts(url: str) -> None:
    code, stdout, _ = type_in(
        "--url", url, "--requests", "2", "--slo-ttft", "5s", "--slo-tpot", "5s"
    )
    assert code == 0
    for word in (
        "TTFT, ms",
        "TPOT, ms",
        "ITL, ms",
        "p99",
        "2 answered, 0 failed",
        "goodput 100.0%",
    ):
        assert word in stdout


def test_a_missing_server_exits_1_with_one_line(url: str) -> None:
    code, stdout, stderr = type_in("--url", "http://127.0.0.1:1")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("penstock bench: the server http://127.0.0.1:1 cannot be reached")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--rate", "1", "--concurrency", "1"),
        ("--for", "3"),
        ("--shape", "tea"),
        ("--rate", "0"),
        ("--nope",),
    ],
)
def test_wrong_usage_is_status_two(words: tuple[str, ...]) -> None:
    assert type_in("--url", "http://127.0.0.1:1", *words)[0] == 2


def test_durations_need_a_unit() -> None:
    assert [duration_s(text) for text in ("250ms", "30s", "1.5m", "1h")] == [
        0.25,
        30.0,
        90.0,
        3600.0,
    ]
    for bad in ("30", "0s", "s", "-1s", "1d"):
        with pytest.raises(UsageError):
            duration_s(bad)
