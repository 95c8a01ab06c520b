"""Counts the processor instructions that the gateway executes per request.

    python bench/instructions.py                                   # this tree, plain requests
    python bench/instructions.py --base main~20 --kinds plain      # compared with a revision
    python bench/instructions.py --functions parse_call pick       # of these functions only

Unlike times, the counts hardly depend on how busy the machine is. Unlike bench/opcodes.py, which
counts Python instructions, they include C code.

The gateway runs in callgrind. Only user-space instructions of a request's callbacks are counted,
without system calls and health checks. The count is the difference between two runs with different
numbers of requests, so that the start is left out.

It needs valgrind and gcc (Debian: `apt install valgrind gcc`).
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

from compared_systems import ROOT, backend, backend_urls, build_tools, free_base
from paired import sources

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
    """Print the processor instructions for each kind of request and each source tree.

    They are counted per request, or with --functions per request and function.
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
        "--base", help="git revision to compare with; prints its counts and the ratio"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["plain"],
        help="kinds of requests to count, with the names of bench/opcodes.py",
    )
    parser.add_argument(
        "--functions",
        nargs="+",
        help="count only these functions or methods of the gateway, such as Relay.feed",
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
