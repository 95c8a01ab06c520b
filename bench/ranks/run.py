"""`make ranks`: compares ways to choose an engine's data-parallel rank for each request.

    python -m bench.ranks.run [--seeds 11-30] [--arms vllm,turns,prefix_aware,oracle:0.1]

The choice is made by the gateway, by the engine, or by an oracle that knows the true state of every
rank. Each way is called an arm. One engine with 8 ranks, which step together, serves agent sessions
that depend on the random seed.

The number of users is the largest one at which the oracle, the last arm, serves 90% of the requests
within their latency budgets. All arms get this traffic. Arms that cannot see ranks are also
measured with a half and a quarter of the users, because they may do better with fewer.

All results are in simulated time, and depend only on the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.confidence_intervals import student_t
from bench.ranks.measure import ARMS, COLD_S, HORIZON_S, RANKS, Measurement, measure
from planner.replay.rank_choice import RankChoice

ORACLE = "oracle:0.1"
"""The oracle with which all arms are compared.

It is the best of nine variants on seeds 1 to 3, by the geometric mean of goodput at nine loads.
"""

AIM, STEP, FIRST = 0.9, 1.3, 20
FEWER = (0.5, 0.25)
LEAST = 1 / (HORIZON_S - COLD_S)
"""Goodput that is assumed for a way to choose without any good request, in requests per second.

It is that of a run with one good request, because a ratio to 0 does not exist.
"""


def find_users(oracle: str, seed: int, log_line: Callable[[str], None]) -> Measurement:
    """Find the largest number of users that the oracle serves well; return its result with them.

    90% of the requests must meet their latency budgets. The numbers that are tried form a geometric
    series.

    oracle    name of the oracle
    seed      random seed of the sessions
    log_line  function called with a line of text about each run
    """
    step = 0
    at = _measured(oracle, seed, _users(step), log_line)
    rises = at.attainment >= AIM
    while True:
        step += 1 if rises else -1
        following = _measured(oracle, seed, _users(step), log_line)
        is_well = following.attainment >= AIM
        if rises and not is_well:
            return at
        at = following
        if is_well and not rises:
            return at
        if at.users <= 1:
            return at


def _users(step: int) -> int:
    return max(1, round(FIRST * STEP**step))


def _measured(arm: str, seed: int, users: int, log_line: Callable[[str], None]) -> Measurement:
    found = measure(arm, seed, users)
    log_line(
        f"seed {seed} {users} users {arm}: {found.goodput:.3f} good/s, attained "
        f"{found.attainment:.3f}, to the most loaded {found.to_most_loaded:.3f} "
        f"({found.cpu_s:.1f} s)"
    )
    return found


def run_seed(arms: Sequence[str], seed: int, log_line: Callable[[str], None]) -> list[Measurement]:
    """Return the results of all arms (ways to choose a rank) on one random seed.

    The last arm must be the oracle, which determines the number of users. Arms that cannot see
    ranks are also measured with a half and a quarter of the users.
    """
    oracle = find_users(arms[-1], seed, log_line)
    results = [oracle]
    for arm in arms[:-1]:
        is_blind = arm in ARMS and ARMS[arm][0] is not RankChoice.GATEWAY
        for share in (1.0, *FEWER) if is_blind else (1.0,):
            users = max(1, round(share * oracle.users))
            results.append(_measured(arm, seed, users, log_line))
    return results


def geometric_mean(ratios: Sequence[float], digits: int = 2) -> str:
    """Return the geometric mean of ratios over random seeds, with its 95 % interval, as text."""
    logs = [log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return f"{exp(logs[0]):.{digits}f}"
    mean, half = fmean(logs), student_t(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    low, middle, high = (exp(mean + side * half) for side in (-1, 0, 1))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def page(results: Sequence[Measurement], arms: Sequence[str], aware: str) -> str:
    """Return the table of all arms (ways to choose a rank) as text.

    It has the goodput of each arm divided by the oracle's, and the goodput of the arm `aware`
    divided by each arm's.
    """
    seeds = sorted({result.seed for result in results})
    top = {result.seed: result for result in results if result.arm == arms[-1]}
    own = {result.seed: result for result in results if result.arm == aware}
    lines = [
        f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]}), "
        f"{', '.join(str(top[seed].users) for seed in seeds)} users.\n\n",
        f"| pick | goodput to the oracle's | {aware} to it | {aware} to its best load | "
        "hits | share of the most loaded rank | most |\n",
        "|---|---|---|---|---|---|---|\n",
    ]
    for arm in arms:
        rows = [result for result in results if result.arm == arm]
        same = {row.seed: row for row in rows if row.users == top[row.seed].users}
        best = {seed: max(row.goodput for row in rows if row.seed == seed) for seed in seeds}
        to_oracle = [_rate(same[seed]) / _rate(top[seed]) for seed in seeds]
        over = [_rate(own[seed]) / _rate(same[seed]) for seed in seeds]
        over_best = [_rate(own[seed]) / max(LEAST, best[seed]) for seed in seeds]
        shares = [same[seed].to_most_loaded for seed in seeds]
        hits = fmean(same[seed].hit_ratio for seed in seeds)
        lines.append(
            f"| {arm} | {geometric_mean(to_oracle)} | {geometric_mean(over)} | "
            f"{geometric_mean(over_best)} | {hits:.1%} | {geometric_mean(shares, 3)} | "
            f"{max(shares):.3f} |\n"
        )
    lines.append(f"\nThe mean rank's share of new work is {1 / RANKS:.3f}.\n")
    return "".join(lines)


def _rate(result: Measurement) -> float:
    return max(LEAST, result.goodput)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", default="11-30", help="first and last seed, as in 11-30, or one seed"
    )
    parser.add_argument(
        "--arms",
        default=f"vllm,turns,priced,prefix_aware,{ORACLE}",
        help="ways to choose a rank that are compared, separated by commas; the last one must "
        "be an oracle (default: %(default)s)",
    )
    parser.add_argument(
        "--aware",
        default="prefix_aware",
        help=(
            "name of the way to choose a rank that is compared with each of the others "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--out", type=Path, help="file of JSON lines to which the results are also written"
    )
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    arms = args.arms.split(",")
    results: list[Measurement] = []
    for seed in range(int(first), int(last or first) + 1):
        results += run_seed(arms, seed, lambda line: print(line, file=sys.stderr, flush=True))
        if args.out is not None:
            rows = b"".join(msgspec.json.encode(result) + b"\n" for result in results)
            args.out.write_bytes(rows)
    print(page(results, arms, args.aware))


if __name__ == "__main__":
    main()
