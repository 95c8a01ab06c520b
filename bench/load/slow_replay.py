"""`make slow`: simulate four engines, one of them slow, and the three healthy ones alone.

    python -m bench.load.slow_replay [--seconds 300] [--seed 11]...

The load is half of what three engines serve. Printed for each policy: the slow engine's share of
the requests after 10 s, the p99 TTFT of both runs, hedged requests, and when engines were ejected.
Exit status: 1 if a share is above 1 %, a p99 above twice that of the three engines, hedged requests
are above 5 %, or a healthy engine was ejected.
"""

from __future__ import annotations

import argparse
import sys

from planner.replay.options import GroupFault, GroupFaultKind
from policies import registry
from tests.sim.test_slow_group import HEDGES, KEPT_S, p99_s, ran, share

FAULTS = ((10.0, ""), (3.0, ""), (3.0, "prefill"), (3.0, "decode"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.load.slow_replay",
        description="Replay routing policies with one slow group of four in simulated time.",
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        help="random seed; repeat the option for more (default: 11 and 12)",
    )
    options = parser.parse_args()
    failed = 0
    for seed in options.seed or (11, 12):
        for policy in registry.names():
            three_s = p99_s(ran(policy, 3, seed, options.seconds)[0])
            failed += sum(
                not _run_case(policy, seed, options.seconds, three_s, *fault) for fault in FAULTS
            )
    print(f"{failed} cases failed" if failed else "all cases passed")
    return int(failed > 0)


def _run_case(
    policy: str, seed: int, seconds: float, three_s: float, factor: float, only: str
) -> bool:
    run, fleet = ran(
        policy, 4, seed, seconds, GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=factor, only=only)
    )
    slow = [f"{time_s:.0f}" for time_s, group in fleet.speed_monitor.ejected if group == 0]
    healthy = [f"{time_s:.0f}" for time_s, group in fleet.speed_monitor.ejected if group]
    slow_share, p99 = share(run, KEPT_S), p99_s(run)
    hedges = len(fleet.hedges.sent) / len(run.records)
    is_met = slow_share <= 0.01 and p99 <= 2 * three_s and hedges <= HEDGES and not healthy
    print(
        f"{'' if is_met else 'FAILS '}{policy:<19} seed {seed}, "
        f"{factor:g} times slower at {only or 'both':<7} share {slow_share:6.2%}, "
        f"p99 TTFT {p99:5.2f} s, of the three {three_s:5.2f} s, hedges {hedges:5.2%}, "
        f"slow group ejected at {' '.join(slow) or '-'} s, healthy ones at "
        f"{' '.join(healthy) or '-'}",
        flush=True,
    )
    return is_met


if __name__ == "__main__":
    sys.exit(main())
