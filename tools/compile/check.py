"""Checks quickly that the modules compile: `python -m tools.compile.check`

Cython translates the modules to C. The C compiler then checks syntax and types only, and generates
no code, which takes a seventh of the time of a full build.

The check finds one kind of error that tests of the Python sources cannot find: a value of one
Cython class that is passed where another class is declared.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.compile.source_tree import HANDWRITTEN, ROOT, write_tree

TREE = ROOT / "build" / "compile-check"
FLAGS = ("-fsyntax-only", "-Werror=incompatible-pointer-types")


def check(tree: Path, sources: Iterable[Path]) -> list[str]:
    """Compile the generated C files without optimisation.

    Return the compiler's messages for each bad file.

    tree     folder in which the compiler runs
    sources  paths of the C files, relative to `tree`
    """

    def errors(source: Path) -> str:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [*compiler, *FLAGS, f"-I{sysconfig.get_path('include')}", str(source)]
        done = subprocess.run(  # noqa: S603
            command, cwd=tree, capture_output=True, text=True, check=False
        )
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text in pool.map(errors, sources) if text]


if __name__ == "__main__":
    sources = [*write_tree(TREE), *HANDWRITTEN]
    if problems := check(TREE, sources):
        sys.exit("\n".join(problems))
    print(f"{len(sources)} modules compile")  # noqa: T201
