"""`make clocks`: the same five minutes of the conversation trace live over HTTP and on the virtual clock, side by side.

    python -m bench.load.two_clocks [--seconds 300] [--speed 1] [--policy prefix_aware] [--within 0.05]

Live: four mock groups, a gateway and a bench client, all real processes on 127.0.0.1; model time runs `speed` times as
fast as the wall. Virtual: planner.replay with the same groups, blocks and requests. Routing amplifies milliseconds: one
request that goes elsewhere takes others along. So the virtual side is the mean of some replays whose arrivals differ by
as much as a live run's do, and their spread is printed. Exit status: 1 when mean TTFT, mean TPOT or hit ratio differ by
more than `within` of that mean. How well first tokens were foreseen at the pick is told of both, and not judged here.
Takes seconds / speed; not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from bench.load.policies_live import fleet
from planner.bench import BenchPlan, run
from planner.replay import FleetSpec, ReplayOptions, replay, traffic
from planner.replay.results import figures
from planner.traces import TraceRequest
from policies import registry
from tests.sim.conversation import TRACE, conversation
from tests.sim.test_policies_on_a_virtual_clock import GROUP

TWINS = 5
JITTER_S = 0.01


class Seen(NamedTuple):
    """What one clock showed, in model time."""

    ttft_s: float
    tpot_s: float
    hit_ratio: float


class Foreseen(NamedTuple):
    """How far predictions of the time from pick to first token were off, as a share of what it was."""

    mape: float
    median: float


def live(policy: str, requests: int, speed: float) -> tuple[Seen, Foreseen | None]:
    """Over HTTP. A failed request is the end of the comparison."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "access.jsonl")
        with fleet(policy, speed, str(log)) as url:
            plan = BenchPlan(url=url, trace=TRACE, speed=speed, limit=requests, ignore_eos=True)
            report = asyncio.run(run(plan))
        foreseen = foreseen_by(log.read_text())
    if report.errors:
        raise SystemExit(f"live requests failed: {report.errors}")
    ttft_s = fmean(one.ttft_s for one in report.completed if one.ttft_s is not None)
    tpot_s = fmean(one.tpot_s for one in report.completed if one.tpot_s is not None)
    return Seen(ttft_s * speed, tpot_s * speed, report.cached_ratio or 0.0), foreseen


def foreseen_by(log: str) -> Foreseen | None:
    """From the lines of an access log, as the metric and a replay count it. None where nothing was foreseen: a gateway
    whose decisions need no beliefs has none."""
    lines = [json.loads(line) for line in log.splitlines()]
    told = [one for one in lines if {"predicted_ttft_us", "first_token_us", "picked_us"} <= one.keys()]
    off = [abs(one["predicted_ttft_us"] / (one["first_token_us"] - one["picked_us"]) - 1.0) for one in told]
    return Foreseen(fmean(off), median(off)) if off else None


def virtual(policy: str, requests: list[TraceRequest], speed: float) -> tuple[Seen, Foreseen]:
    """On the virtual clock, in blocks as small as the live mock's; clients say max_tokens, as the bench client does."""
    spec = FleetSpec("live's twin", (msgspec.structs.replace(GROUP, max_concurrency=256),), block_tokens=16)
    options = ReplayOptions(expected_output=None, scrape_s=speed)
    seen = figures(replay(spec, traffic(requests), registry.build(policy, {}), options=options))
    assert seen.ttft is not None
    assert seen.tpot is not None
    assert seen.ttft_error is not None
    assert seen.ttft_error_p50 is not None
    return Seen(seen.ttft.mean, seen.tpot.mean, seen.hit_ratio), Foreseen(seen.ttft_error, seen.ttft_error_p50)


def jittered(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Every arrival late by chance, as a live sender's are."""
    rng = Random(seed)
    return [msgspec.structs.replace(one, arrival_s=one.arrival_s + rng.expovariate(1 / JITTER_S)) for one in requests]


def main() -> int:
    options = _options()
    requests = [one for one in conversation() if one.arrival_s < options.seconds]
    twins = [virtual(options.policy, jittered(requests, seed), options.speed) for seed in range(TWINS)]
    other, foreseen = live(options.policy, len(requests), options.speed)
    worst = 0.0
    print(f"{len(requests)} requests of {options.seconds:g} s, {options.policy}, live at speed {options.speed:g}")
    for name, replays, seen in zip(Seen._fields, zip(*(seen for seen, _ in twins), strict=True), other, strict=True):
        expected = fmean(replays)
        off = seen / expected - 1
        worst = max(worst, abs(off))
        spread = f"({min(replays):.4f} to {max(replays):.4f})"
        print(f"{name:<10} virtual {expected:.4f} {spread}  live {seen:.4f}  difference {off:+.1%}")
    for name, replays in zip(Foreseen._fields, zip(*(told for _, told in twins), strict=True), strict=True):
        seen_live = "nothing (--policy priced)" if foreseen is None else f"{getattr(foreseen, name):.1%}"
        print(f"first tokens foreseen, {name:<6} of the error: virtual {fmean(replays):.1%}  live {seen_live}")
    return 0 if worst <= options.within else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.load.two_clocks", description="Live and virtual time compared.")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="of live model time against the wall")
    parser.add_argument("--policy", default="prefix_aware")
    parser.add_argument("--within", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
