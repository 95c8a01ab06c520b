"""Counts the processor instructions that the gateway executes per request.

    python bench/instructions.py                                   # this tree, plain requests
    python bench/instructions.py --base main~20 --kinds plain      # compared with a revision
    python bench/instructions.py --functions parse_call pick       # of these functions only
    python bench/instructions.py --trees build/compiled --top 40   # compiled, function by function

Unlike times, the counts hardly depend on how busy the machine is. Unlike bench/opcodes.py, which
counts Python instructions, they include C code.

The gateway runs in callgrind. Only user-space instructions of a request's callbacks are counted,
without system calls and health checks. The requests that warm the caches are not counted.

It needs valgrind and gcc (Debian: `apt install valgrind gcc`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compare_versions import sources
from compared_systems import ROOT, backend, backend_urls, build_tools, free_base

WARM_UP, COUNTED = 60, 300
"""Numbers of requests before the count and during it."""
# Calls of valgrind that switch the counting on or off, and that forget what has been counted.
LIBRARY_SOURCE = """
#include <valgrind/callgrind.h>
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void forget(void) { CALLGRIND_ZERO_STATS; }
"""
TOTAL_LINE = re.compile(r"^ *([\d,]+) \(100.0%\)  PROGRAM TOTALS", re.MULTILINE)
# A line of callgrind_annotate: "1,234 ( 0.10%)  file.c:function [/folder/library.so]".
FUNCTION_LINE = re.compile(r"^ *([\d,]+) \( *[\d.]+%\)  (\S+):(.*?)(?: \[(.*)\])?$", re.MULTILINE)

Key = TypeVar("Key")


@dataclass(frozen=True)
class Count:
    """How many processor instructions the gateway executed per request.

    functions  own instructions by (path of the program or library, function)
    """

    total: float
    functions: dict[tuple[str, str], float]


def main() -> None:
    """Count and print the processor instructions of each kind of request, for each source tree.

    They are counted per request, or with --functions per request and function.
    """
    options = _options()
    build_tools()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library, trees = _build_library(folder), options.trees or [ROOT]
        if options.base is not None:
            base = sources(options.base, folder / "base", compiled=False)
            trees = [stack.enter_context(base), *trees]
        for kind in options.kinds:
            for function in options.functions or [""]:
                counts = [_count(tree, kind, function, library) for tree in trees]
                totals = [count.total for count in counts]
                ratio = f"  ratio {totals[1] / totals[0]:.3f}" if len(totals) == 2 else ""
                print(f"{kind}  {function}", *(f"{total:9,.0f}" for total in totals), ratio)
                if options.top:
                    for tree, count in zip(trees, counts, strict=True):
                        _print_functions(tree, count, options.top)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", help="git revision to compare with; prints its counts and the ratio"
    )
    parser.add_argument(
        "--trees",
        nargs="+",
        type=lambda text: Path(text).resolve(),
        help="count these copies of the project instead of this one, such as build/compiled",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["plain"],
        help="kinds of requests to count; bench/opcodes.py lists their names (default: plain)",
    )
    parser.add_argument(
        "--functions",
        nargs="+",
        help="count only these functions or methods of the gateway, such as Relay.feed; not those "
        "that compiled code calls directly",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=0,
        help="also print the counts by library, and this number of functions with the highest "
        "counts; compiled modules have names of functions only if built with `LDFLAGS= make "
        "compiled`",
    )
    return parser.parse_args()


def _build_library(folder: Path) -> Path:
    # Compile the library that switches callgrind's counting; return its path.
    source, library = folder / "switch.c", folder / "switch.so"
    source.write_text(LIBRARY_SOURCE)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def _count(tree: Path, kind: str, function: str, library: Path) -> Count:
    # Serve requests of this kind in callgrind. Count `function` alone unless it is "".
    base = free_base()
    with backend(base), tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        command = [
            *("valgrind", "--tool=callgrind", "--collect-atstart=no"),
            f"--callgrind-out-file={counts}",
            *(sys.executable, str(Path(__file__).with_name("instructions_child.py"))),
            *(str(tree), kind, function, str(WARM_UP), str(COUNTED), str(base + 300)),
            *backend_urls(base),
        ]
        environment = {**os.environ, "SWITCH_LIBRARY": str(library), "PYTHONPATH": ""}
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        annotate = [
            "callgrind_annotate",
            "--threshold=100",
            "--auto=no",
            "--inclusive=no",
            str(counts),
        ]
        text = subprocess.run(annotate, check=True, capture_output=True, text=True).stdout
    total_line = TOTAL_LINE.search(text)
    assert total_line is not None
    total = _integer(total_line[1])
    functions: dict[tuple[str, str], float] = defaultdict(float)
    for number, _, name, place in FUNCTION_LINE.findall(text):
        if _integer(number) < total:  # callgrind assigns the total to the callers of the callbacks
            functions[place, name] += _integer(number) / COUNTED
    return Count(total / COUNTED, functions)


def _integer(text: str) -> int:
    return int(text.replace(",", ""))


def _print_functions(tree: Path, count: Count, number: int) -> None:
    libraries: dict[str, float] = defaultdict(float)
    for (library, _), instructions in count.functions.items():
        is_gateway = Path(library).is_relative_to(tree)
        libraries["the gateway's modules" if is_gateway else library] += instructions
    for library, instructions in _highest(libraries)[:8]:
        print(f"{instructions:9,.0f}  {library}")
    for (library, name), instructions in _highest(count.functions)[:number]:
        print(f"{instructions:9,.0f}    {name}  [{Path(library).name}]")


def _highest(counts: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(counts.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    main()
