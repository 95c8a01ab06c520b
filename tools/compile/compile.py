"""Compiles the modules that serve requests, for use in place: `python -m tools.compile.compile OUT`

The folder OUT gets a copy of the project, with extension modules beside the Python sources. Run
programs from OUT, or add OUT to PYTHONPATH, to use them. wheel.py builds wheels instead.

The extension modules work with the running version of Python only. A build needs a C compiler, the
headers of Python, the project's dependencies and 250 MB of memory. It takes about three minutes on
two cores.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.compile.source_tree import SMALL_LIST, tree_digest, write_tree

STAMP = "made-of"
FLAGS = (
    "-O2 -g0 -DNDEBUG -fwrapv -fno-plt -falign-jumps=1 -falign-labels=1 "
    "-fno-asynchronous-unwind-tables -fno-unwind-tables"
)
"""Flags of the C compiler unless CFLAGS is set.

CPython binds a module's functions when it loads the module, so stubs for late binding (PLT) would
only add a jump to each call. The code has a label at every check for an error; aligning all labels
would make it a thirtieth larger. Without the other flags, debugging information would make up five
sixths of a module's size, and tables for C++ exceptions a fifteenth.
"""
SMALL_FLAGS = "-Os"
"""Further flags for packages that are optimized for size, unless CFLAGS is set."""
CHECKS = "-Werror=incompatible-pointer-types"
"""Flags of the C compiler that always apply: they make passing the wrong C class an error."""
LINKER_FLAGS = (
    "-s -Wl,-z,noseparate-code -Wl,-z,norelro -Wl,-z,common-page-size=64 "
    "-Wl,--hash-style=gnu -Wl,--build-id=none"
)
"""Flags of the linker unless LDFLAGS is set.

Without them every module is 16 kB larger. Two of those are padding, with which the table of
imported functions could be made read-only after loading. Two others are the rest of the page before
the module's variables, which the linker fills with zeros unless common-page-size is small.
"""


def main(out: Path) -> None:
    """Compile the project in a copy of it in the folder `out`, unless that copy is up to date."""
    digest = build_digest()
    if (out / STAMP).is_file() and (out / STAMP).read_text() == digest:
        print(f"{out} is up to date")  # noqa: T201
        return
    generated = write_tree(out)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    for folder in (out, out / "kvtransfer"):  # the request path, and the pump of KV links
        subprocess.run(command, cwd=folder, env=compiler_environment(), check=True)  # noqa: S603
        shutil.rmtree(folder / "build")
    for source in generated:
        (out / source).unlink()
    for name in ("setup.py", SMALL_LIST):
        (out / name).unlink()
    (out / STAMP).write_text(digest)
    print(f"{len(generated)} modules compiled into {out}")  # noqa: T201


def build_digest() -> str:
    """Return a hash of everything that a build depends on.

    This includes the sources, the Python version, the C compiler and its flags.
    """
    compiler = f"{os.environ.get('CC')} {flags(compiler_environment())}"
    return hashlib.sha256(f"{sys.version} {compiler} {tree_digest()}".encode()).hexdigest()


def compiler_environment() -> dict[str, str]:
    """Return the environment variables for a build.

    They are those of this process, with CFLAGS and LDFLAGS for the C compiler and the linker.
    """
    chosen = os.environ.get("CFLAGS")
    return {
        "LDFLAGS": LINKER_FLAGS,
        "SMALL_CFLAGS": SMALL_FLAGS if chosen is None else "",
        **os.environ,
        "CFLAGS": f"{FLAGS if chosen is None else chosen} {CHECKS}",
    }


def flags(environment: Mapping[str, str]) -> str:
    """Return the flags of the C compiler and the linker in an environment, as one line of text."""
    return " | ".join(environment[name] for name in ("CFLAGS", "SMALL_CFLAGS", "LDFLAGS"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
