"""Tests that the version tells whether the gateway's modules are compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gateway
from gateway.util.version import is_compiled

HOME = Path(gateway.__file__).parent.parent
IMPORT_EACH_FIRST = """
import os, sys
from importlib import import_module
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported first")
"""


@pytest.mark.skipif(
    not is_compiled(), reason="only compiled modules import classes for their types"
)
def test_every_compiled_module_can_be_imported_first() -> None:
    compiled = [
        path.relative_to(HOME)
        for room in ("gateway", "policies")
        for path in (HOME / room).rglob("*.so")
    ]
    names = [".".join([*path.parent.parts, path.name.partition(".")[0]]) for path in compiled]
    assert "gateway.serve_request" in names
    command = [sys.executable, "-c", IMPORT_EACH_FIRST, *names]
    result = subprocess.run(
        command, cwd=HOME, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
