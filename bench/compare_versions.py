"""Compares the CPU time of two versions of the gateway, per request and per stream chunk.

    make bench-paired BASE=main~20
    python bench/compare_versions.py BASE [--head REVISION] [--pairs N] [--window-ms D]
                                          [--cells TEXT] [--compiled]

BASE and REVISION are git revisions; without --head, the working tree is compared with BASE.

Both gateways run at the same time with the same configuration, core and backend. They are measured
in pairs of short periods, one of each version, in random order. The result is the median ratio of
the pairs with its 95% interval, which assumes no distribution. Counts of Python instructions
(bench/opcodes.py) follow, unless --cells selects some kinds of traffic.

Exit status: 0 if the upper end of every interval is at most --limit (1.02), else 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from compared_systems import (
    ROOT,
    Running,
    System,
    backend,
    backend_urls,
    build_tools,
    free_base,
    penstock_command,
    start,
)
from confidence_intervals import median_interval
from traffic_cells import Measure, Pace, cpu_per_request, long_prompts, paced, streams


@dataclass(frozen=True)
class PairedCell:
    """One kind of traffic for which the CPU time of two versions is compared.

    policy   the routing policy of both gateways
    measure  function that measures the CPU time of one gateway for this traffic
    """

    name: str
    policy: str
    measure: Measure


CELLS = (
    PairedCell("request, round_robin", "round_robin", cpu_per_request),
    PairedCell("request, prefix_aware", "prefix_aware", cpu_per_request),
    PairedCell("request, 2k-token prompt", "prefix_aware", long_prompts(2_000)),
    PairedCell("chunk, 400 streams", "round_robin", streams(400, paced(300, 10_000, 5_000), 304)),
)


def main() -> int:
    """Compare the CPU time of two versions for every kind of traffic, and print a line for each.

    Returns the exit status: 1 if an interval exceeds the limit, otherwise 0.
    """
    options = _options()
    build_tools()
    base = free_base()
    order = random.Random(options.seed)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-paired-")))
        old = stack.enter_context(sources(options.base, work / "old", compiled=options.compiled))
        new = stack.enter_context(sources(options.head, work / "new", compiled=options.compiled))
        with backend(base):
            highest = _compare(old, new, options, base, work, order)
        if not options.compiled and not options.cells:
            _print_instructions(old, new)
    return 0 if highest <= options.limit else 1


def _compare(
    old: Path, new: Path, options: argparse.Namespace, base: int, work: Path, order: random.Random
) -> float:
    # Print the ratios of all cells; return the highest upper end of their intervals.
    pace, highest = Pace(options.window_ms, 300), 0.0
    cells = [cell for cell in CELLS if options.cells in cell.name]
    for policy in dict.fromkeys(cell.policy for cell in cells):
        with ExitStack() as stack:
            pair = []
            for number, home in enumerate((old, new)):
                command = penstock_command(policy, backend_urls(base))
                place = work / f"{policy}-{number}"
                place.mkdir()
                system = System(f"tree {number}", policy, base + 101 + number, command, home)
                pair.append(start(system, place))
                stack.callback(pair[-1].stop)
            for cell in (cell for cell in cells if cell.policy == policy):
                figures = [
                    _measure_pair(cell, pair, pace, work, order) for _ in range(options.pairs)
                ]
                highest = max(highest, _print_cell(cell, figures))
    return highest


def _measure_pair(
    cell: PairedCell, pair: list[Running], pace: Pace, work: Path, order: random.Random
) -> tuple[float, float]:
    turns = [0, 1]
    order.shuffle(turns)
    cpu_us = {turn: cell.measure(pair[turn], pace, work)["cpu"] for turn in turns}
    return cpu_us[0], cpu_us[1]


def _print_cell(cell: PairedCell, figures: list[tuple[float, float]]) -> float:
    low, middle, high = median_interval([new / old for old, new in figures])
    old, new = (median(values) for values in zip(*figures, strict=True))
    print(
        f"{cell.name:28} old {old:7.2f}  new {new:7.2f} us  "
        f"ratio {middle:.3f}  95 % interval {low:.3f} to {high:.3f}  ({len(figures)} pairs)",
        flush=True,
    )
    return high


@contextmanager
def sources(revision: str | None, place: Path, *, compiled: bool) -> Iterator[Path]:
    """Yield the folder with the sources of a git revision, compiled if requested.

    revision  the revision; None: the working tree
    place     folder in which a copy may be created
    compiled  whether the gateway is compiled
    """
    home = ROOT
    if revision is not None:
        home = place
        _git("worktree", "add", "--quiet", "--detach", str(place), revision)
    try:
        if not compiled:
            yield home
            return
        built = place.with_name(f"{place.name}-compiled")
        command = [sys.executable, "-m", "tools.compile.compile", str(built)]
        if not (home / "tools" / "compile").is_dir():  # a revision before the move to tools/
            command = [sys.executable, str(home / "deploy" / "compile.py"), str(built)]
        subprocess.run(command, check=True, cwd=home)
        yield built
    finally:
        if revision is not None:
            _git("worktree", "remove", "--force", str(place))


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, cwd=ROOT)


def _print_instructions(*homes: Path) -> None:
    for name, home in zip(("old", "new"), homes, strict=True):
        print(f"instructions, {name}:", flush=True)
        script = Path("bench", "opcodes.py")
        if not (home / script).is_file():  # a revision before the move out of tests/
            script = Path("tests") / script
        subprocess.run([sys.executable, str(script)], check=True, cwd=home)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_versions.py", description="Compare the CPU of two versions of the gateway."
    )
    parser.add_argument("base", help="git revision with which the measured one is compared")
    parser.add_argument("--head", help="git revision to measure (default: the working tree)")
    parser.add_argument(
        "--pairs", type=int, default=24, help="number of measured periods of each version"
    )
    parser.add_argument(
        "--window-ms",
        type=int,
        default=1000,
        help="length of a measured period in milliseconds (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the measuring order")
    parser.add_argument(
        "--limit",
        type=float,
        default=1.02,
        help="highest allowed ratio new / old (upper end of the 95 %% interval)",
    )
    parser.add_argument(
        "--cells",
        default="",
        help="measure only the kinds of traffic whose name contains this text, and count no "
        "instructions",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="compile both versions before measuring them"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
