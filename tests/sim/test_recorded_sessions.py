"""Tests that long sessions of recorded clients find their prompts cached, on virtual time.

`make recorded-sessions` measures all recorded clients; here are those with session ids of their own
and one without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "claude_code-messages",
    "codex_cli-responses",
    "openai_sdk-stored",
    "litellm_chat-anthropic",
)


@pytest.fixture(scope="module")
def shares() -> dict[str, dict[str, float]]:
    # Run the benchmark in a process of its own, because it replaces the clock of its process.
    command = [sys.executable, "-m", "bench.clients.recorded_sessions", "--json", "--only", *NAMES]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    found: dict[str, dict[str, float]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("policy", ["prefix_aware", "priced"])
@pytest.mark.parametrize("name", NAMES)
def test_four_sessions_of_twenty_turns_are_cached_as_in_one_endless_cache(
    shares: dict[str, dict[str, float]], name: str, policy: str
) -> None:
    assert 0.95 <= shares[name][policy] <= 1.0
