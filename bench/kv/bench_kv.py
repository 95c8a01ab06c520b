"""`make bench-kv`: compares our KV transports with NIXL, Mooncake, plain TCP and memory copies.

    python bench/kv/bench_kv.py [--quick] [--rounds N] [--only text,text] [--seed S]
                                [--pool-mib M] [--retakes R] [--json FILE] [--write-docs] [--check]

Each transport copies the same scattered blocks from one process to another. The processes run
during the whole benchmark. Every round measures each transport, in a new random order, so that
other load on the machine affects all of them equally. docs/performance.md explains the table.

Exit status: 0 if measured, 1 if --check is given and a goal is missed, 2 for invalid options.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from block_memory import reference
from contestants import HERE, ROOT, Contestant, NotMeasurable, Pair, all_contestants, install_peers
from goals import SIZES, WAITS, Results, cpu, markdown, speed, verdicts, wait
from measure import bandwidth, exposed_share, latency, least_disturbed

Task = tuple[str, int | None, Callable[[Pair, random.Random], dict[str, float]]]


def main() -> int:
    """Compare the KV transports: install, start and measure each, and print the table.

    Return the exit status.
    """
    options = _options()
    missing = install_peers()
    results = Results(options.rounds)
    with tempfile.NamedTemporaryFile(prefix="penstock-kv-", dir=_memory_folder()) as expected:
        reference(options.pool_mib << 20, options.seed).tofile(expected)
        expected.flush()
        pairs = _start(
            [item for item in all_contestants() if _is_selected(item, options.only)],
            missing,
            Path(expected.name),
            results,
        )
        try:
            _measure(pairs, options, results)
        finally:
            for pair in pairs.values():
                pair.end()
    return _report(results, options)


def _memory_folder() -> str | None:
    # Return a memory-backed folder for the reference blocks, or None if there is none.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _is_selected(contestant: Contestant, only: list[str]) -> bool:
    return not only or any(words in contestant.name for words in only)


def _start(
    wanted: list[Contestant], missing: dict[str, str], expected: Path, results: Results
) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for contestant in wanted:
        try:
            if contestant.module in missing:
                raise NotMeasurable(missing[contestant.module])
            pairs[contestant.name] = Pair(contestant, expected)
        except NotMeasurable as error:
            results.problems[contestant.name] = str(error)
    return pairs


def _tasks(pool_bytes: int) -> list[Task]:
    def move_task(size: int) -> Callable[[Pair, random.Random], dict[str, float]]:
        def task(pair: Pair, rng: random.Random) -> dict[str, float]:
            result = bandwidth(pair, size, pool_bytes, rng)
            return {speed(size): result.gb_s, cpu(size): result.cpu_s_per_gb}

        return task

    def wait_task(size: int) -> Callable[[Pair, random.Random], dict[str, float]]:
        def task(pair: Pair, rng: random.Random) -> dict[str, float]:
            result = latency(pair, size, pool_bytes, rng)
            return {wait(size, "p50"): result.p50_us, wait(size, "p99"): result.p99_us}

        return task

    tasks: list[Task] = [(f"{SIZES[size]} blocks", size, move_task(size)) for size in SIZES]
    tasks += [(f"{SIZES[size]} latency", size, wait_task(size)) for size in WAITS]
    return [
        *tasks,
        (
            "layer-wise",
            None,
            lambda pair, rng: {"exposed share": exposed_share(pair, pool_bytes, rng)},
        ),
    ]


def _measure(pairs: dict[str, Pair], options: argparse.Namespace, results: Results) -> None:
    rng = random.Random(options.seed)
    for round_number in range(options.rounds):
        for name, size, task in _tasks(options.pool_mib << 20):
            _log(f"round {round_number + 1}/{options.rounds}: {name}")
            able = [key for key, pair in sorted(pairs.items()) if _can_take(pair.contestant, size)]
            for contestant in rng.sample(able, len(able)):
                _take(round_number, contestant, pairs, task, rng, options.retakes, results)


def _can_take(contestant: Contestant, size: int | None) -> bool:
    return size in contestant.sizes or (size is None and contestant.by_layers)


def _take(
    round_number: int,
    contestant: str,
    pairs: dict[str, Pair],
    task: Callable[[Pair, random.Random], dict[str, float]],
    rng: random.Random,
    retakes: int,
    results: Results,
) -> None:
    # Do one measurement and return its results.
    #
    # A contestant that fails is removed from `pairs`, because its state is then unknown.
    try:
        share, numbers = least_disturbed(
            pairs[contestant], lambda: task(pairs[contestant], rng), retakes
        )
        results.others.append(share)
        for quantity, value in numbers.items():
            results.add(round_number, contestant, quantity, value)
    except NotMeasurable as error:
        results.problems[contestant] = str(error)
        _log(f"  {error}")
        pairs.pop(contestant).end()


def _report(results: Results, options: argparse.Namespace) -> int:
    table = markdown(results)
    if options.json:
        samples = {
            f"{contestant}: {quantity}": list(v.values())
            for (contestant, quantity), v in results.samples.items()
        }
        goals = {
            v.goal.name: {"asked": v.goal.requirement, "value": v.value, "met": v.met}
            for v in verdicts(results)
        }
        Path(options.json).write_text(
            json.dumps({"samples": samples, "goals": goals}, indent=2) + "\n"
        )
    if options.write_docs:
        _write_docs(table, options.rounds)
    print(table)
    judgements = verdicts(results)
    has_missed = not judgements or any(not verdict.met for verdict in judgements)
    return 1 if options.check and has_missed else 0


def _write_docs(table: str, rounds: int) -> None:
    page = ROOT / "docs" / "performance.md"
    begin, end = "<!-- bench-kv:begin -->", "<!-- bench-kv:end -->"
    before, has_begin, remainder = page.read_text().partition(begin)
    _, has_end, after = remainder.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(
            f"the page {page} lacks the comments {begin} ... {end}, between which the table "
            "is written; add them"
        )
    sys.path.insert(0, str(HERE.parent))
    from compare_routers_table import cpu_name

    machine = (
        f"Python {platform.python_version()}, {os.cpu_count()} cores of {cpu_name()}, "
        f"Linux {platform.release()}"
    )
    page.write_text(
        f"{before}{begin}\nMedians of {rounds} rounds; {machine}.\n\n{table}\n{end}{after}"
    )


def _options() -> argparse.Namespace:
    options = _parser().parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_kv.py",
        description="Compare the KV transfer speed of several transports on this machine.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure two rounds instead of five, for a quick look"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="number of rounds; each measures every transport (default: 5, or 2 with --quick)",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help="measure only the transports whose names contain one of these texts, separated "
        "by commas",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="random seed for block contents, the chosen blocks and the order of measurements",
    )
    parser.add_argument(
        "--retakes",
        type=int,
        default=1,
        help="how often to repeat a measurement if other processes use 10 percent of the "
        "machine or more",
    )
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=256,
        help="memory per process from which blocks are chosen, in MiB (default: %(default)s)",
    )
    _add_output_options(parser)
    return parser


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", help="file to which every sample is also written, as JSON")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write the table of results to docs/performance.md",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a goal is missed"
    )


def _log(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
