"""Both forms of gateway/protocol/byte_scan.py: the one in C is compiled from the checkout."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from gateway.protocol import python_byte_scan

SOURCE = Path(__file__).parents[1] / "gateway" / "protocol" / "_byte_scan.c"
HAS_COMPILER = (
    shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
)
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="needs a C compiler and Python's headers"
)
PYTHON = python_byte_scan


@cache
def c_form() -> ModuleType:
    """Compile the C form with all warnings as errors, and return it."""
    with tempfile.TemporaryDirectory(prefix="penstock-byte-scan-") as folder:
        library = Path(folder) / "_byte_scan.so"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run(
            [*command, "-shared", "-fPIC", include, str(SOURCE), "-o", str(library)], check=True
        )
        spec = importlib.util.spec_from_file_location("_byte_scan", library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
