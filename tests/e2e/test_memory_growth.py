"""Tests that no memory of a gateway grows beyond its limit with requests, faults and reloads."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.processes import ENV, ROOT


def test_no_structure_grows_beyond_its_bound_over_thousands_of_requests_and_faults() -> None:
    # Time is virtual, so that a busy machine changes nothing. `make memory` sends more requests.
    command = ["-m", "bench.memory_virtual", "--requests", "4500", "--parts", "3"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "all requirements are met" in done.stdout
