"""Compile the native pump of KV links next to its source: python -m tools.compile.pump

Wheels contain it. A checkout gets it where a C compiler and Python's headers are; elsewhere KV
moves by the same functions in Python (kvtransfer/transports/iovec.py).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "kvtransfer" / "transports" / "_pump.c"
LIBRARY = SOURCE.with_suffix(".abi3.so")
FLAGS = ("-O2", "-Wall", "-Wextra", "-shared", "-fPIC")


def build() -> str | None:
    """Compile the pump for any CPython from 3.11 on, into the folder of its source.

    Returns the reason why it could not be compiled, or None.
    """
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return f"{include} has no Python.h (Debian: python3-dev)"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, f"-I{include}", "-o", str(LIBRARY), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    return None if done.returncode == 0 else done.stderr.strip()


if __name__ == "__main__":
    if problem := build():
        print(f"KV moves without the native pump: {problem}", file=sys.stderr)  # noqa: T201
