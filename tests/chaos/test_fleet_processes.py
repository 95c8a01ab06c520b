"""Tests of a helper of the chaos tests: it reports a gateway that ends while it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.fleet_processes import wait_until_listening


def test_a_gateway_that_ends_while_it_starts_is_reported_with_its_status_and_stderr(
    tmp_path: Path,
) -> None:
    stderr = tmp_path / "stderr"
    broken = [sys.executable, "-c", "import sys; sys.stderr.write('a broken part'); sys.exit(7)"]
    with stderr.open("wb") as file, subprocess.Popen(broken, stderr=file) as process:
        process.wait()
        with pytest.raises(AssertionError, match=r"exit status 7 .*\n.*a broken part"):
            wait_until_listening(process, stderr)
