"""`make overload`: sends a gateway twice the load that its engines can serve, with 600 open
streams.

    python -m bench.load.overload [--runs 1] [--ahead] [--admission priced] [--policy NAME]
                                  [--seed 1] [--json FILE]

Eight mock engines, a gateway and a load generator of two processes run on 127.0.0.1. A run takes
four minutes on two cores. Its phases:

1. round trips on the idle machine
2. half of capacity, while 600 long streams are opened
3. spike: 30 s at twice capacity, with clients that obey Retry-After
4. 60 s at half of capacity
5. storm: 20 s at twice capacity, with clients that ignore Retry-After
6. 40 s at half of capacity

Capacity is found by a simulation. Round trips to a server that refuses every request show how busy
the machine is with other work. Exit status: 1 if a median over the runs misses its limit.
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
from bench.load.overload_plan import POLICY, Plan, find_capacity_per_s
from bench.load.overload_processes import READY_S, generate_load, run_fleet

MAX_RUNS = 5


def main() -> int:
    options = _options()
    if options.ahead:
        _take_priority()
    rate = options.capacity or find_capacity_per_s()
    print(f"capacity without the open streams: {rate:.2f} requests/s (virtual clock)", flush=True)
    runs = []
    for number in range(options.runs):
        runs.append(run_phases(options.admission, options.policy, rate, options.seed + number))
        _print_figures(runs[-1])
    medians = [_median(bounds) for bounds in zip(*(run.bounds() for run in runs), strict=True)]
    _print_verdicts(medians, len(runs))
    if options.json:
        Path(options.json).write_bytes(
            msgspec.json.format(msgspec.json.encode({"capacity_per_s": rate, "runs": runs}))
        )
    return 0 if all(bound.is_met for bound in medians) else 1


def run_phases(admission: str, policy: str, rate: float, seed: int) -> Figures:
    draft = Plan("", "", 0.0, rate, seed)
    with run_fleet(admission, policy, draft.ends_s + READY_S + 60.0) as running:
        plan = Plan(running.gateway.url, running.null_url, time.monotonic() + READY_S, rate, seed)
        clients, streams, sent, used = generate_load(plan, running)
        shares = ", ".join(
            f"{name} {share.core_s:.0%} (waited {share.runnable_s:.0%})"
            for name, share in used.items()
        )
        print(
            f"seed {seed}: core use in the spike: {shares}; load average {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        time.sleep(0.5)  # wait until the access log is complete
        return figures(plan, clients, streams, running.refusals(), sent)


def _median(bounds: Sequence[Bound]) -> Bound:
    return msgspec.structs.replace(bounds[0], value=median(bound.value for bound in bounds))


def _take_priority() -> None:
    # Give this process and its children real-time priority. Requires root.
    #
    # A nice value would not suffice, because it has no effect between scheduling groups.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _print_figures(run: Figures) -> None:
    for name in ("idle", "busy", "shed", "shed_inside", "unread", "waited"):
        times = getattr(run, name)
        print(
            f"  {name:<12} {times.count:>5}  p50 {times.p50_ms:8.2f} ms  p99 {times.p99_ms:8.2f} ms"
        )
    print(
        "  idle, busy, shed: until the answer is in the client's socket; "
        "unread: from then until the client's process reads it"
    )
    print(
        f"  refused {run.refused}, with Retry-After {run.with_retry_after:.0%}, "
        f"{run.tries:.1f} tries per client in the storm"
    )
    print(
        f"  spike: {run.offered} clients, {run.accepted} admitted; "
        f"new clients good at the first try afterwards {run.fresh_after:.1%}"
    )


def _print_verdicts(bounds: list[Bound], runs: int) -> None:
    print(f"\n{'median of ' + str(runs) + ' runs':<56} {'measured':>10} {'bound':>10}")
    for bound in bounds:
        sign = ">=" if bound.least else "<="
        measured, limit = f"{bound.value:.3g}{bound.unit}", f"{sign} {bound.limit:g}{bound.unit}"
        print(f"{bound.name:<56} {measured:>10} {limit:>10}  {'' if bound.is_met else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.overload",
        description="Overload a fleet of mock engines with twice its capacity over HTTP.",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        choices=range(1, MAX_RUNS + 1),
        help="number of runs; the result is the median over them (default: %(default)s)",
    )
    parser.add_argument(
        "--admission",
        default="priced",
        help="name of the admission policy to measure, for example cap",
    )
    parser.add_argument(
        "--policy", default=POLICY, help="routing policy of the gateway (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity",
        type=float,
        help="capacity of the fleet in requests per second (default: measured)",
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="run the measuring processes with real-time priority (needs root)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="random seed of the first run; each further run uses the next number (default: "
        "%(default)s)",
    )
    parser.add_argument("--json", help="file to which all figures are also written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
