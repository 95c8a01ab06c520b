"""Tests of batch jobs beside live requests: a gateway and mock engines on virtual time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def measure(*options: str) -> dict[str, Any]:
    # Run the benchmark in a process of its own, because it replaces the clock of its process.
    command = [sys.executable, "-m", "bench.batch_virtual", "--json", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_batch_on_the_last_tenth_of_a_pool_slows_no_live_request_and_loses_no_token() -> None:
    found = measure("--lines", "12", "--load", "0.9", "--seeds", "11")
    assert found["live_alone"] > 0.98
    assert found["live_beside"] >= found["live_alone"] - 0.005
    assert found["long_stops"] >= 20
    assert (found["status"], found["results"], found["twice"]) == ("completed", 12, 0)
    assert found["equal"] == 12
    # No token of an answer was generated twice, not even one on its way at a stop.
    assert (found["extra_tokens"], found["unlogged_tokens"]) == (0, 0)
    assert (found["kept_tokens_again"], found["in_flight_tokens"]) == (0, 0)
    assert sum(found["stops_by_tokens_in_flight"].values()) >= found["long_stops"]


def test_a_batch_on_a_pool_that_is_always_full_ends_in_its_window() -> None:
    found = measure("--lines", "8", "--load", "1.3", "--seeds", "12")
    assert (found["status"], found["results"], found["equal"]) == ("completed", 8, 8)
    assert found["live_beside"] >= found["live_alone"] - 0.02
