"""`make overload`: twice what a fleet can do, over HTTP, with 600 answers flowing: what a refusal costs, what is kept.

    python -m bench.load.overload [--runs 1] [--ahead] [--admission priced] [--policy NAME] [--seed 1] [--json FILE]

Real processes on 127.0.0.1: eight mock groups, a gateway, and a load generator in two processes. A run: the idle
machine's loopback, half of capacity while 600 long answers are opened, 30 s at twice capacity with clients that obey
Retry-After, a minute at half, 20 s at twice capacity with clients that retry by their own back-off, 40 s at half.
Capacity is found on the virtual clock. Exit status: 1 when a median over the runs misses its bound. Four minutes a run,
of two cores; other load on the machine shows in the round trips to a server that does nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.load.overload_figures import Bound, Figures, figures
from bench.load.overload_house import READY_S, house, load
from bench.load.overload_plan import POLICY, Plan, capacity_per_s

MAX_RUNS = 5


def main() -> int:
    options = _options()
    if options.ahead:
        _go_ahead()
    rate = options.capacity or capacity_per_s()
    print(f"capacity beside the open streams: {rate:.2f} requests/s (virtual clock)", flush=True)
    runs = []
    for number in range(options.runs):
        runs.append(one_run(options.admission, options.policy, rate, options.seed + number))
        _tell(runs[-1])
    held = [_median(bounds) for bounds in zip(*(run.bounds() for run in runs), strict=True)]
    _verdict(held, len(runs))
    if options.json:
        Path(options.json).write_bytes(
            msgspec.json.format(msgspec.json.encode({"capacity_per_s": rate, "runs": runs}))
        )
    return 0 if all(bound.held for bound in held) else 1


def one_run(admission: str, policy: str, rate: float, seed: int) -> Figures:
    """A fresh fleet through all phases."""
    draft = Plan("", "", 0.0, rate, seed)
    with house(admission, policy, draft.ends_s + READY_S + 60.0) as running:
        plan = Plan(running.gateway.url, running.still_url, time.monotonic() + READY_S, rate, seed)
        seen, streams, sent, used = load(plan, running)
        shares = ", ".join(
            f"{name} {share.core_s:.0%} (waited {share.waited_s:.0%})"
            for name, share in used.items()
        )
        print(
            f"seed {seed}: of a core in the spike: {shares}; load average {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        time.sleep(0.5)  # the access log's last lines
        return figures(plan, seen, streams, running.refusals(), sent)


def _median(bounds: Sequence[Bound]) -> Bound:
    """One bound over all runs."""
    return msgspec.structs.replace(bounds[0], value=median(each.value for each in bounds))


def _go_ahead() -> None:
    """Ahead of everybody else on the machine, with all that is started from here: needs root. No nice value does it
    where sessions are scheduled as groups, and others' groups may be as nice."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _tell(run: Figures) -> None:
    """What is behind the bounds."""
    for name in ("idle", "busy", "shed", "shed_inside", "unread", "waited"):
        times = getattr(run, name)
        print(
            f"  {name:<12} {times.count:>5}  p50 {times.p50_ms:8.2f} ms  p99 {times.p99_ms:8.2f} ms"
        )
    print(
        "  idle, busy, shed end when the answer is in the client's socket; unread: until the client's process reads it"
    )
    print(
        f"  refused {run.refused}, told a time {run.told:.0%}, {run.tries:.1f} tries a client in the storm"
    )
    print(
        f"  spike: {run.offered} came, {run.accepted} let in; new ones good at once afterwards {run.fresh_after:.1%}"
    )


def _verdict(bounds: list[Bound], runs: int) -> None:
    print(f"\n{'median of ' + str(runs) + ' runs':<56} {'seen':>10} {'bound':>10}")
    for bound in bounds:
        sign = ">=" if bound.least else "<="
        seen, limit = f"{bound.value:.3g}{bound.unit}", f"{sign} {bound.limit:g}{bound.unit}"
        print(f"{bound.name:<56} {seen:>10} {limit:>10}  {'' if bound.held else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.overload", description="Twice capacity over HTTP."
    )
    parser.add_argument("--runs", type=int, default=1, choices=range(1, MAX_RUNS + 1))
    parser.add_argument("--admission", default="priced", help="cap or another, to compare")
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument(
        "--capacity", type=float, help="requests a second, instead of finding it first"
    )
    parser.add_argument(
        "--ahead", action="store_true", help="run ahead of all else on this machine (root)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
