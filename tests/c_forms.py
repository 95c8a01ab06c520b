"""Compiles the gateway's C code for tests that compare it with the same functions in Python."""

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

ROOT = Path(__file__).parents[1]
HAS_COMPILER = (
    shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
)
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="needs a C compiler and Python's headers"
)


@cache
def compile_module(source: str, *flags: str) -> ModuleType:
    """Compile a C file with all warnings as errors, and return the module.

    The file is given by its path in the checkout. `flags` are further arguments of the compiler.
    """
    name = Path(source).stem
    with tempfile.TemporaryDirectory(prefix="penstock-c-form-") as folder:
        library = Path(folder) / f"{name}.so"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", *flags]
        includes = [f"-I{sysconfig.get_path('include')}", f"-I{ROOT}"]
        subprocess.run(
            [*command, "-shared", "-fPIC", *includes, str(ROOT / source), "-o", str(library)],
            check=True,
        )
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
