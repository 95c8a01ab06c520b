"""Check that the request path compiles, without code generation: python -m tools.compile.check

Cython translates all modules (source_tree.py), and the C compiler checks types and pointers only.
That takes a seventh of a build's time, and finds what the tests on the sources cannot: C classes
that Cython confuses.
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
    """Return the C compiler's error messages for these C files of a source tree, in the order of
    the files.
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
