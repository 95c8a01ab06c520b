"""`make slow`: simulates how the gateway treats one slow engine of four.

    python -m bench.load.slow_replay [--seconds 300] [--seed 11]... [--policy NAME]... [--unequal]

The load is half of what three healthy engines serve. The three healthy engines are also simulated
alone, for comparison. For each policy, it prints:

- the slow engine's share of the requests, without the first 10 s
- the p99 time to first token of both runs
- the share of requests that were sent to a second engine (hedged)
- when engines were ejected

With --unequal, no engine has a fault. Instead, one or two engines of four are always half as fast,
which their label shows or does not show.

Exit status: 1 if a share is above 1%, a p99 is more than twice that of the three engines, more than
5% of the requests are hedged, or a healthy engine is ejected.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from planner.replay import FleetSpec, GroupKind, ReplayOptions, traffic
from planner.replay.fleet_sim import Fleet
from planner.replay.replay_options import GroupFault, GroupFaultKind
from policies import policy_registry
from tests.sim.test_slow_group import GROUP, HEDGES, KEPT_S, p99_s, ran, requests, share

FAULTS = ((10.0, ""), (3.0, ""), (3.0, "prefill"), (3.0, "decode"))


def _half(count: int, labelled_gpu: str = "") -> tuple[GroupKind, GroupKind]:
    # Return four groups, of which `count` take twice as long.
    slow = msgspec.structs.replace(GROUP, count=count, slowness=2.0, labelled_gpu=labelled_gpu)
    return slow, msgspec.structs.replace(GROUP, count=4 - count)


UNEQUAL = {
    "one of four": _half(1),
    "two of four": _half(2),
    "one, declared": _half(1, "h100"),
    "two, declared": _half(2, "h100"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.load.slow_replay",
        description="Replay routing policies with one slow group of four in simulated time.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="simulated length of each replay in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        help="random seed; repeat the option for more (default: 11 and 12)",
    )
    parser.add_argument(
        "--policy", action="append", help="policy to replay; may be repeated (default: all)"
    )
    parser.add_argument(
        "--unequal",
        action="store_true",
        help="simulate engines of different speeds, none of which is faulty",
    )
    options = parser.parse_args()
    failed = 0
    for seed in options.seed or (11, 12):
        for policy in options.policy or policy_registry.names():
            if options.unequal:
                failed += sum(
                    not _run_unequal(policy, seed, options.seconds, name) for name in UNEQUAL
                )
                continue
            three_s = p99_s(ran(policy, 3, seed, options.seconds)[0])
            failed += sum(
                not _run_case(policy, seed, options.seconds, three_s, *fault) for fault in FAULTS
            )
    print(f"{failed} cases failed" if failed else "all cases passed")
    return int(failed > 0)


def _run_unequal(policy: str, seed: int, seconds: float, name: str) -> bool:
    fleet = Fleet(
        FleetSpec(name, UNEQUAL[name]),
        traffic(requests(seed, seconds)),
        policy_registry.build(policy, {}),
        None,
        ReplayOptions(slow_factor=2.5, hedge_share=HEDGES),
    )
    run = fleet.run()
    ejected = [f"{group} at {time_s:.0f} s" for time_s, group in fleet.speed_monitor.ejected]
    hedges = len(fleet.hedges.sent) / len(run.records)
    is_met = hedges <= HEDGES and not ejected
    print(
        f"{'' if is_met else 'FAILS '}{policy:<19} seed {seed}, twice as slow: {name:<13} "
        f"p99 TTFT {p99_s(run):5.2f} s, hedges {hedges:5.2%}, ejected: {', '.join(ejected) or '-'}",
        flush=True,
    )
    return is_met


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
