"""Access to the tools of `make deploy-check`; the project's own packages come first on the path."""

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
    """Return a function that runs a tool in the project's root: (exit status, output)."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        program = TOOLS / "bin" / name
        assert program.exists(), f"{name} is missing: run `make deploy-check`"
        env = os.environ | {"PYTHONPATH": str(TOOLS)}
        command = [str(program), *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WITHIN_S
        )
        return result.returncode, result.stdout + result.stderr

    return run
