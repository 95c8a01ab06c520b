"""`make bench-kv`: our transports beside NIXL, Mooncake, raw TCP and memcpy, moving the same scattered blocks.

Every contestant is two processes that live through the whole run; within a round all of them take every measurement, in
a new random order, so that whatever else the machine does falls on all alike. docs/performance.md says what they mean.

    python bench/kv/bench_kv.py [--quick] [--rounds N] [--only words,words] [--seed S] [--pool-mib M]
                                      [--retakes R] [--json FILE] [--write-docs] [--check]

Exit status: 0 measured, 1 with --check and a goal missed, 2 wrong usage.
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

from contestants import HERE, ROOT, Contestant, NotMeasurable, Pair, everyone, install_peers
from goals import SIZES, WAITS, Results, cpu, markdown, speed, verdicts, wait
from measure import bandwidth, exposed_share, latency, least_disturbed
from pool import reference

Task = tuple[str, int | None, Callable[[Pair, random.Random], dict[str, float]]]


def main() -> int:
    """Installs, starts, measures, shows."""
    options = _options()
    missing = install_peers()
    results = Results(options.rounds)
    with tempfile.NamedTemporaryFile(prefix="penstock-kv-", dir=_memory()) as expected:
        reference(options.pool_mib << 20, options.seed).tofile(expected)
        expected.flush()
        pairs = _start(
            [who for who in everyone() if _wanted(who, options.only)],
            missing,
            Path(expected.name),
            results,
        )
        try:
            _measure(pairs, options, results)
        finally:
            for pair in pairs.values():
                pair.end()
    return _show(results, options)


def _memory() -> str | None:
    """The blocks' reference lives in memory where the system offers a place for that."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _wanted(who: Contestant, only: list[str]) -> bool:
    return not only or any(words in who.name for words in only)


def _start(
    wanted: list[Contestant], missing: dict[str, str], expected: Path, results: Results
) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for who in wanted:
        try:
            if who.module in missing:
                raise NotMeasurable(missing[who.module])
            pairs[who.name] = Pair(who, expected)
        except NotMeasurable as error:
            results.problems[who.name] = str(error)
    return pairs


def _tasks(pool_bytes: int) -> list[Task]:
    def moved(size: int) -> Callable[[Pair, random.Random], dict[str, float]]:
        def task(pair: Pair, rng: random.Random) -> dict[str, float]:
            got = bandwidth(pair, size, pool_bytes, rng)
            return {speed(size): got.gb_s, cpu(size): got.cpu_s_per_gb}

        return task

    def waited(size: int) -> Callable[[Pair, random.Random], dict[str, float]]:
        def task(pair: Pair, rng: random.Random) -> dict[str, float]:
            got = latency(pair, size, pool_bytes, rng)
            return {wait(size, "p50"): got.p50_us, wait(size, "p99"): got.p99_us}

        return task

    tasks: list[Task] = [(f"{SIZES[size]} blocks", size, moved(size)) for size in SIZES]
    tasks += [(f"{SIZES[size]} latency", size, waited(size)) for size in WAITS]
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
    for turn in range(options.rounds):
        for name, size, task in _tasks(options.pool_mib << 20):
            _say(f"round {turn + 1}/{options.rounds}: {name}")
            able = [name for name, pair in sorted(pairs.items()) if _able(pair.who, size)]
            for who in rng.sample(able, len(able)):
                _one(turn, who, pairs, task, rng, options.retakes, results)


def _able(who: Contestant, size: int | None) -> bool:
    return size in who.sizes or (size is None and who.by_layers)


def _one(
    turn: int,
    who: str,
    pairs: dict[str, Pair],
    task: Callable[[Pair, random.Random], dict[str, float]],
    rng: random.Random,
    retakes: int,
    results: Results,
) -> None:
    """A contestant that fails is out: what state it would go on in is not known."""
    try:
        share, numbers = least_disturbed(pairs[who], lambda: task(pairs[who], rng), retakes)
        results.others.append(share)
        for quantity, value in numbers.items():
            results.add(turn, who, quantity, value)
    except NotMeasurable as error:
        results.problems[who] = str(error)
        _say(f"  {error}")
        pairs.pop(who).end()


def _show(results: Results, options: argparse.Namespace) -> int:
    table = markdown(results)
    if options.json:
        samples = {
            f"{who}: {quantity}": list(v.values()) for (who, quantity), v in results.samples.items()
        }
        goals = {
            v.goal.name: {"asked": v.goal.asked, "value": v.value, "met": v.met}
            for v in verdicts(results)
        }
        Path(options.json).write_text(
            json.dumps({"samples": samples, "goals": goals}, indent=2) + "\n"
        )
    if options.write_docs:
        _write_docs(table, options.rounds)
    print(table)
    judged = verdicts(results)
    return 1 if options.check and (not judged or any(not verdict.met for verdict in judged)) else 0


def _write_docs(table: str, rounds: int) -> None:
    """Replaces what stands between the markers of the page."""
    page = ROOT / "docs" / "performance.md"
    begin, end = "<!-- bench-kv:begin -->", "<!-- bench-kv:end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    if not found or not ends:
        raise SystemExit(f"{page} has no {begin} ... {end}")
    sys.path.insert(0, str(HERE.parent))
    from table import cpu_name

    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores of {cpu_name()}, Linux {platform.release()}"
    page.write_text(
        f"{before}{begin}\nMedians of {rounds} rounds; {machine}.\n\n{table}\n{end}{after}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_kv.py", description="Compare KV transfers on this machine."
    )
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument(
        "--rounds", type=int, help="rounds of every measurement (5; 2 with --quick)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help="contestants holding these words",
    )
    parser.add_argument("--seed", type=int, default=1, help="of contents, slots and order")
    parser.add_argument(
        "--retakes",
        type=int,
        default=1,
        help="of a measurement while others use a tenth of the machine",
    )
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=256,
        help="memory of each process out of which blocks are drawn",
    )
    parser.add_argument("--json", help="write every sample here as well")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/performance.md"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 when a goal is missed")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
