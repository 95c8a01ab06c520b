"""Tests of mirrored requests: an engine on trial that answers differently is detected."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.processes import ENV, GatewayProcess, gateway_process, mock_fleet

# Many, because requests that arrive while other answers are compared are not mirrored.
MOST_REQUESTS = 20_000


def page(running: GatewayProcess) -> dict[str, Any]:
    with urllib.request.urlopen(running.admin_url + "/mirror", timeout=30) as answer:
        row: dict[str, Any] = json.load(answer)["mirrors"][0]
        return row


@pytest.mark.parametrize(("noise", "exit_code"), [("0", 0), ("0.25", 3)])
async def test_a_candidate_that_answers_otherwise_is_worse_than_chance(
    tmp_path: Path, noise: str, exit_code: int
) -> None:
    with mock_fleet() as base, mock_fleet("--answer-noise", noise) as other:
        config = (
            "models: [{name: demo-8b, pool: main}]\n"
            "pools:\n"
            f"  main: {{endpoints: [{{url: '{base[0]}'}}],\n"
            "    mirror: {to: candidate, percent: 100, in_flight: 8, "
            "tokens_per_minute: 100000000, max_tokens: 8}}\n"
            f"  candidate: {{endpoints: [{{url: '{other[0]}'}}]}}\n"
        )
        with gateway_process(tmp_path, config) as running:
            async with aiohttp.ClientSession() as http:
                for number in range(MOST_REQUESTS):
                    if not number % 50 and page(running)["blocks"]:
                        break
                    body = {"model": "demo-8b", "max_tokens": 8, "prompt": f"question {number}"}
                    async with http.post(f"{running.url}/v1/completions", json=body) as answer:
                        assert answer.status == 200
            assert page(running)["blocks"] >= 1
            words = [sys.executable, "-m", "gateway", "mirror", "--admin", running.admin_url]
            shown = subprocess.run(words, capture_output=True, text=True, env=ENV)
            assert shown.returncode == exit_code, shown.stdout + shown.stderr
            assert ("WORSE" in shown.stdout) is (exit_code == 3)
            assert "question" not in running.stderr_text
