"""Measures how close `policy: auto` comes to the best routing policy, on random workloads.

    python -m bench.zoo.auto --seed SEED --count 20 --out FILE

With `policy: auto`, a gateway compares policies by simulations of its recent access log, and
switches to the best one. Here each workload begins with the policy that suits it least. Its load is
the highest one at which the best policy serves 90% of the requests in time.

The comparisons use the access log of the simulated gateway, and only what a configuration file can
say about the engines. The capacities measured beforehand are not used.

Comparisons are INTERVAL_S apart as in the gateway, or less for short and frequent requests (see
`interval_of`). The requests after the third comparison count.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import log
from pathlib import Path
from time import process_time

import msgspec

from bench.zoo.measure import STEP, Case, build_case_of, find_capacity
from bench.zoo.space import draw
from gateway.config.auto_section import DEFAULT_PORTFOLIO
from planner.auto.log_window import choose_window
from planner.auto.policy_estimation import evaluate
from planner.plan.config_to_replay import PoolCase
from planner.plan.recent_traffic import RecentTraffic
from planner.replay.fleet_sim import Fleet
from planner.replay.fleet_spec import FleetSpec, GroupKind
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_options import ReplayOptions
from planner.replay.results import RequestEnd
from planner.traces.access_log import LoggedRequest, arrived_s
from policies import policy_registry
from policies.admission.admission_policy import WaitQueueLimits
from policies.admission.fairness import FairShares
from policies.auto.replay_messages import PolicyMember
from policies.auto.switch_decision import Action, PolicyDecider

INTERVAL_S = 300.0
"""Most seconds between two comparisons; the gateway's default."""

INTERVALS, COMPARISONS = 5, 4
"""Length of a replay in intervals, and number of comparisons, each at the end of an interval."""

COUNTED_FROM = 3 / 5
"""Share of the replay's duration (0 to 1) that is not counted, so that the policies can adapt."""

LEAST_REQUESTS, LEAST_DURATIONS = 1_500, 3.0
"""An interval is shorter than INTERVAL_S if this many requests arrive in it, and it is as long as
this many requests at the limit of their budgets take."""

WINDOW_INTERVALS = 2.0
"""Length of the replayed part of the log, as the gateway has it by default."""

MOST_REQUESTS = 8_000
"""Workloads that need more requests are left out."""


class AutoResult(msgspec.Struct, frozen=True):
    """How `policy: auto` did on one workload, and how each policy did alone.

    load        load of the simulations, as a multiple of the workload's estimated capacity
    interval_s  seconds between two comparisons
    start       the policy at the beginning
    final       the policy in use at the end
    capacities  load at which each policy alone has an attainment of 90%
    alone       attainment of each policy alone, over the counted requests
    auto        attainment with comparisons, over the same requests
    decisions   action, policy and reason of each comparison
    compare_s   CPU time of the comparisons in seconds
    """

    seed: str
    number: int
    load: float
    interval_s: float
    start: str
    final: str
    capacities: dict[str, float]
    alone: dict[str, float]
    auto: float
    decisions: list[tuple[str, str, str]]
    cpu_s: float
    compare_s: float

    @property
    def ratio(self) -> float:
        """Return the attainment of `policy: auto`, divided by the best of the policies alone."""
        best = max(self.alone.values())
        return self.auto / best if best else 1.0

    @property
    def capacity_ratio(self) -> float:
        """Return the capacity of the final policy, divided by the best capacity of any policy."""
        best = max(self.capacities.values())
        return self.capacities[self.final] / best if best else 1.0


class LoggedFleet(Fleet):
    """A simulated fleet with an access log. Its routing policy can be replaced while it runs."""

    lines: list[LoggedRequest]

    def end(self, now: float, flight: InflightRequest, end: RequestEnd, reason: str) -> None:
        super().end(now, flight, end, reason)
        record, trace = flight.record, flight.trace_request
        is_served = end is RequestEnd.SERVED

        def elapsed_us(moment: float | None) -> int | None:
            return None if moment is None else round(1e6 * (moment - record.arrived_s))

        self.lines.append(
            LoggedRequest(
                time=record.arrived_s,
                status=200 if is_served else 429,
                received_us=0,
                prompt_tokens=record.prompt_tokens,
                completion_tokens=record.output_tokens,
                events=record.output_tokens + 2,
                first_token_us=elapsed_us(record.first_s),
                last_us=elapsed_us(record.done_s),
                slo_outcome="met" if record.is_good else "ttft_missed",
                session_id=zlib.crc32(record.session.encode()),
                endpoint=record.group,
                blocks=trace.blocks,
                block_tokens=trace.block_tokens,
            )
        )


def known_fleet(spec: FleetSpec) -> FleetSpec:
    """Return the engines as the gateway knows them: only facts that its configuration can contain.

    These are labels, layouts, KV sizes and limits.
    """
    kinds = tuple(
        GroupKind(
            kind.model,
            kind.labelled_gpu or kind.gpu,
            kind.tp,
            role=kind.role,
            kv_tokens=kind.capacity_tokens,
            max_num_seqs=kind.max_num_seqs,
            max_num_batched_tokens=kind.labelled_batched_tokens or kind.max_num_batched_tokens,
        )
        for kind in spec.groups
    )
    return FleetSpec(spec.name, kinds, split=spec.split, pairs=spec.pairs)


class Prepared(msgspec.Struct, frozen=True):
    """A random workload that is ready to be measured, and how well each policy alone served it."""

    case: Case
    load: float
    capacities: dict[str, float]
    alone: dict[str, float]

    @property
    def start(self) -> str:
        """Return the policy that alone had the lowest attainment.

        The measurement of `auto` begins with it.
        """
        return min(self.alone, key=self.alone.__getitem__)


def build_long_case(seed: str, number: int) -> Case | None:
    """Return a random workload with enough requests for the comparisons; None if it has too
    many.
    """
    workload = draw(seed, number)
    case = build_case_of(workload, 0)
    lengths = sorted(request.output_tokens for request in case.requests.requests)
    duration_s = case.slo.ttft_s + case.slo.tpot_s * lengths[int(0.9 * len(lengths))]
    shortest_s = max(LEAST_REQUESTS / case.rate_s, LEAST_DURATIONS * duration_s)
    count = round(INTERVALS * min(INTERVAL_S, shortest_s) * case.rate_s)
    if count > MOST_REQUESTS:
        return None
    return build_case_of(msgspec.structs.replace(workload, requests=count), 0)


def prepare(case: Case, portfolio: Sequence[str]) -> Prepared:
    """Measure each policy alone, to compare it with `policy: auto`.

    Two results are measured for each policy, on the counted requests. The capacity is the load at
    which 90% of the requests meet their latency budgets. The attainment is the share of requests
    that meet them at the largest of all capacities.
    """
    step, capacities = 0, {}
    for policy in portfolio:
        capacities[policy] = find_capacity(_attainment_of(case, policy), 0.9, step)
        step = round(log(max(capacities[policy], 1 / 30)) / log(STEP))
    load = max(capacities.values())
    alone = {policy: _run(case, load, policy, ())[0] for policy in portfolio}
    return Prepared(case, load, capacities, alone)


def _attainment_of(case: Case, policy: str) -> Callable[[int], float]:
    # Return a function from a step of load to the attainment of the policy alone.
    return lru_cache(None)(lambda step: _run(case, STEP**step, policy, ())[0])


def measure(prepared: Prepared, portfolio: Sequence[str]) -> AutoResult:
    """Simulate a workload with `policy: auto`, beginning with its worst policy."""
    began, case, start = process_time(), prepared.case, prepared.start
    attained, chooser = _run(case, prepared.load, start, portfolio)
    return AutoResult(
        seed=case.workload.seed,
        number=case.workload.number,
        load=prepared.load,
        interval_s=chooser.interval_s,
        start=start,
        final=chooser.policy,
        capacities=prepared.capacities,
        alone=prepared.alone,
        auto=attained,
        decisions=chooser.decisions,
        cpu_s=process_time() - began,
        compare_s=chooser.cpu_s,
    )


def _run(case: Case, load: float, start: str, portfolio: Sequence[str]) -> tuple[float, _Chooser]:
    # Return the attainment over the counted requests, and the component that compared policies.
    traffic = case.at(load)
    span_s = case.horizon_s or max(request.arrival_s for request in traffic.arrivals)
    options = ReplayOptions(
        seed=case.arrivals, learns_lengths=True, standard=case.slo, horizon_s=case.horizon_s
    )
    fleet = LoggedFleet(case.fleet, traffic, policy_registry.build(start, {}), None, options)
    fleet.lines = []
    chooser = _Chooser(case, fleet, start, portfolio, span_s / INTERVALS)
    if portfolio:
        for index in range(1, COMPARISONS + 1):
            fleet.schedule(index * chooser.interval_s, chooser.compare)
    run = fleet.run()
    counted = [record for record in run.records if record.arrived_s >= COUNTED_FROM * span_s]
    counted = [record for record in counted if record.end is not RequestEnd.CUT]
    good = sum(record.is_good for record in counted) / len(counted) if counted else 0.0
    return good, chooser


class _Chooser:
    def __init__(
        self,
        case: Case,
        fleet: LoggedFleet,
        start: str,
        portfolio: Sequence[str],
        interval_s: float,
    ) -> None:
        self._fleet, self.interval_s = fleet, interval_s
        self.policy, self._since_s = start, 0.0
        self.cpu_s = 0.0
        self._portfolio = [PolicyMember(policy) for policy in portfolio]
        self._decider = PolicyDecider()
        self._endpoints = [group.name for group in fleet.groups]
        self.decisions: list[tuple[str, str, str]] = []
        self._case = PoolCase(
            pool="zoo",
            models=None,
            fleet=known_fleet(case.fleet),
            policy_name=start,
            policy_params={},
            admission_name="none",
            admission_params={},
            limits=WaitQueueLimits(100_000, 1e6),
            shares=FairShares({}),
            classes={},
            standard=case.slo,
            assumed=(),
        )

    def compare(self, now: float, _: object) -> None:
        began = process_time()
        window_s = WINDOW_INTERVALS * self.interval_s
        lines = sorted(
            (line for line in self._fleet.lines if arrived_s(line) >= now - 2 * window_s),
            key=arrived_s,
        )
        if not lines:
            return
        from_s = max(now - window_s, arrived_s(lines[0]))
        lately = RecentTraffic(lines, arrived_s(lines[0]), from_s)
        lately = choose_window(lately, max(from_s, self._decider.counted_until_s), now)
        names = [PolicyMember(self.policy)]
        names += [member for member in self._portfolio if member.label != self.policy]
        estimate = evaluate(self._case, names, self._endpoints, lately, self._since_s)
        virtual_s = now / self.interval_s * INTERVAL_S
        decision = self._decider.decide(virtual_s, estimate, may_switch=True)
        self.decisions.append((str(decision.action), decision.member, decision.reason))
        if decision.action is Action.SWITCH:
            self._decider.on_switched(virtual_s, self.policy)
            self.policy, self._since_s = decision.member, now
            self._fleet.gateway.policy = policy_registry.build(decision.member, {})
        self.cpu_s += process_time() - began


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="development", help="random seed of all workloads")
    parser.add_argument("--first", type=int, default=0, help="number of the first workload to run")
    parser.add_argument(
        "--count", type=int, default=20, help="number of workloads to run (default: %(default)s)"
    )
    parser.add_argument(
        "--portfolio",
        default=",".join(DEFAULT_PORTFOLIO),
        help="policies to choose from, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file to which results are appended, one JSON object per line",
    )
    return parser.parse_args()


def main() -> None:
    args = _parse_options()
    portfolio = args.portfolio.split(",")
    results = []
    for number in range(args.first, args.first + args.count):
        if draw(args.seed, number).split != "none":
            print(f"{number}: split fleet, left out")
            continue
        case = build_long_case(args.seed, number)
        if case is None:
            print(f"{number}: more than {MOST_REQUESTS} requests, left out")
            continue
        result = measure(prepare(case, portfolio), portfolio)
        with args.out.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        results.append(result)
        print(text_of(result), flush=True)
    _print_summary(results)


def _print_summary(results: Sequence[AutoResult]) -> None:
    for name, ratios in (
        ("attainment", sorted(result.ratio for result in results)),
        ("capacity", sorted(result.capacity_ratio for result in results)),
    ):
        if ratios:
            share = sum(ratio >= 0.985 for ratio in ratios) / len(ratios)
            print(
                f"{len(ratios)} workloads, {name}: least {ratios[0]:.3f} of the best policy's, "
                f"{share:.0%} at 0.985 or more"
            )


def text_of(result: AutoResult) -> str:
    """Return one line of text that describes a workload's result."""
    actions = ",".join(decision[0] for decision in result.decisions)
    return (
        f"{result.number}: attains {result.ratio:.3f}, capacity {result.capacity_ratio:.3f} of the "
        f"best; {result.start} alone {result.alone[result.start]:.3f}, best "
        f"{max(result.alone.values()):.3f}, auto {result.auto:.3f} with {result.final}; {actions}"
    )


if __name__ == "__main__":
    main()
