"""Compiles the path of a request and of a chunk with Cython, from the very same sources: compile.py OUT

OUT gets a copy of the rooms with extension modules beside the sources; run it with OUT as the working directory or on
PYTHONPATH. Optional: the sources run as they are, and tests run on them. It needs a C compiler, Python's headers, some
minutes and 250 MB of memory. CFLAGS are the compiler's; unless they are set, debugging information, five sixths of a
module, is left out.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Distribution

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("gateway", "policies", "kvtransfer", "mockgpu", "planner")
HOT = (
    *("account", "attempts", "canary", "endpoints", "errand", "exchange", "explain", "framing", "front", "gate"),
    *("head", "kept", "legs", "meters", "openai", "outbox", "overflow", "prefixes", "quotas", "relay", "serve"),
    *("shadow", "slo", "talk", "upstream"),
    *(f"split/{name}" for name in ("dispatch", "edit", "handoffs", "leg", "life", "pair", "words")),
)
DECISIONS = (
    *("admission", "appraisal", "dual", "fairness", "filters", "foreign", "health", "latency", "ledger", "lengths"),
    *("lessons", "outlook", "pacing", "paper", "pickers", "prefix_index", "price", "quota", "returns", "run"),
    *("scorers", "sessions", "split", "timeline", "usage", "waiting"),
)
# Annotations stay annotations: a compiled module must behave as its source does, not faster at the price of meaning.
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "binding": True}


def main(out: Path) -> None:
    """Copies, compiles in place, says how many."""
    shutil.rmtree(out, ignore_errors=True)
    for room in ROOMS:
        shutil.copytree(ROOT / room, out / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    os.chdir(out)
    sources = [f"gateway/{name}.py" for name in HOT] + [f"policies/{name}.py" for name in DECISIONS]
    os.environ.setdefault("CFLAGS", "-O2 -g0 -DNDEBUG -fwrapv")
    extensions = cythonize(sources, nthreads=os.cpu_count() or 1, compiler_directives=DIRECTIVES, quiet=True)
    build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    build.inplace, build.parallel = True, os.cpu_count()
    build.build_temp = build.build_lib = "objects"
    build.ensure_finalized()
    build.run()
    shutil.rmtree("objects")
    for extension in extensions:
        Path(extension.sources[0]).unlink()  # the C that it was made of
    print(f"{len(extensions)} modules compiled into {out}")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
