"""Fixtures for `make deploy-check`: the external tools that check deployment files.

Their Python packages are searched last, so that the project's own versions are used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "deploy-tools"
WITHIN_S = 60.0
sys.path.append(str(TOOLS))


@pytest.fixture
def tool():
    # Return a function that runs one of the tools in the repository's root.
    #
    # It returns the tool's exit status and output.
    def run(name: str, *arguments: str) -> tuple[int, str]:
        program = TOOLS / "bin" / name
        assert program.exists(), f"{name} is not there: run `make deploy-check`"
        env = os.environ | {"PYTHONPATH": str(TOOLS)}
        command = [str(program), *arguments]
        said = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WITHIN_S
        )
        return said.returncode, said.stdout + said.stderr

    return run
