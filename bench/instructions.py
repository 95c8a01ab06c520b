"""Count the processor's instructions per request; other load on the machine hardly changes them.

    python bench/instructions.py                                   # this tree, plain requests
    python bench/instructions.py --base main~20 --kinds plain      # beside an older revision
    python bench/instructions.py --functions parse_call pick       # what these functions take

Needs valgrind and gcc (Debian: `apt install valgrind gcc`). A gateway runs in callgrind as in
bench/opcodes.py, whose bytecode counts hide what C code costs. Only the instructions of user space
within a request's callbacks count: no system calls, no health checks. A second run with more
requests gives the difference, so that start-up and warming caches do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from paired import sources
from systems import ROOT, backend, backend_urls, build_tools, free_base

FEW, MANY = 60, 360
"""Numbers of requests in two runs.

The difference of their counts belongs to the additional requests alone, without start-up and
warming caches.
"""

TOGGLE_SOURCE = """
#include <valgrind/callgrind.h>
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
"""


def main() -> None:
    """Count processor instructions; print a line for each kind of request and each source tree.

    The counts are per request, or with --functions per request and function.
    """
    options = _options()
    build_tools()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        toggle, trees = _build_toggle(folder), [ROOT]
        if options.base is not None:
            base = sources(options.base, folder / "base", compiled=False)
            trees.insert(0, stack.enter_context(base))
        for kind in options.kinds:
            for function in options.functions or [""]:
                counts = [_per_request(tree, kind, function, toggle) for tree in trees]
                ratio = f"  ratio {counts[1] / counts[0]:.3f}" if len(counts) == 2 else ""
                print(f"{kind}  {function}", *(f"{count:9,.0f}" for count in counts), ratio)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", help="git revision to compare with; its counts and the ratio are printed"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["plain"],
        help="kinds of requests to count, as in bench/opcodes.py",
    )
    parser.add_argument(
        "--functions", nargs="+", help="count only these functions of the gateway, given by name"
    )
    return parser.parse_args()


def _build_toggle(folder: Path) -> Path:
    # Compile the library that turns callgrind's counting on and off; return its path.
    source, library = folder / "toggle.c", folder / "toggle.so"
    source.write_text(TOGGLE_SOURCE)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def _per_request(tree: Path, kind: str, function: str, toggle: Path) -> float:
    # Return the instructions per request of this kind; of `function` alone unless it is "".
    few, many = (_count(tree, kind, function, toggle, requests) for requests in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def _count(tree: Path, kind: str, function: str, toggle: Path, requests: int) -> int:
    # Serve this number of requests in callgrind; return the instructions that were counted.
    base = free_base()
    with backend(base), tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        command = [
            *("valgrind", "--tool=callgrind", "--collect-atstart=no"),
            f"--callgrind-out-file={counts}",
            *(sys.executable, str(Path(__file__).with_name("instructions_child.py"))),
            *(str(tree), kind, function, str(requests), str(base + 300)),
            *backend_urls(base),
        ]
        environment = {**os.environ, "TOGGLE_LIBRARY": str(toggle), "PYTHONPATH": ""}
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        total = re.search(r"^(?:summary|totals): (\d+)", counts.read_text(), re.MULTILINE)
        assert total is not None
        return int(total[1])


if __name__ == "__main__":
    main()
