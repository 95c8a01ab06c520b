"""Tests that mock engines and a gateway start with the files that `penstock size` writes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import ENV, gateway_process, run_process
from tests.ports import free_port

QUESTION = (
    *("size", "llama-3.1-70b", "--gpu", "h100", "--in", "6000", "--out", "200", "--context"),
    *("8k", "--rate", "4", "--max-concurrency", "24", "--ttft", "1.2s", "--tpot", "38ms"),
)


def emitted(target: str, port: int) -> str:
    command = [sys.executable, "-m", "gateway", *QUESTION, "--emit", target]
    return subprocess.run(
        [*command, "--first-port", str(port)], env=ENV, capture_output=True, text=True, check=True
    ).stdout


def test_the_emitted_mock_groups_and_gateway_serve(tmp_path: Path) -> None:
    port = free_port()
    # The ports of the gateway are not those that `size` emits, but free ones.
    listeners = "listeners: {api: {port: 0}, admin: {port: 0}}\n"
    _, *arguments = shlex.split(emitted("mock", port))
    mock = [sys.executable, "-m", "gateway", *arguments]
    with run_process(mock, stdout=subprocess.PIPE, env=ENV) as groups:
        assert groups.stdout is not None
        assert [groups.stdout.readline()[:6] for _ in range(3)] == ["ready "] * 3
        config = emitted("gateway", port) + listeners
        with gateway_process(tmp_path, config, complete=False) as gateway:
            body = {"model": "llama-3.1-70b-fp8", "prompt": "hello", "max_tokens": 4}
            request = urllib.request.Request(
                f"{gateway.url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
