"""`policy: auto` on drawn workloads: how close it comes to the best policy from a wrong start.

    python -m bench.zoo.auto --seed SEED --count 20 --out FILE

Starts each workload with the policy that suits it least. Each workload is replayed at the load at
which the first policy of the portfolio attains 90 %. The pool begins with the policy that attains
least there. Its requests end in a log, from which the planner's own code makes the estimates, with
a fleet that knows only what a configuration can say. The policies' own capacities and the drawn
truth are not used for decisions.

A replay has a fixed number of requests, which stand for an interval of 5 minutes and a window of
7.5 minutes: the second half of the requests, after three comparisons, is what counts.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from math import log
from pathlib import Path
from time import process_time

import msgspec

from bench.zoo.measure import STEP, Attainments, Case, build_case_of
from bench.zoo.space import draw
from gateway.config.auto_section import DEFAULT_PORTFOLIO
from planner.auto.evaluate import evaluate, limit_traffic
from planner.plan.pool_case import PoolCase
from planner.plan.recent import RecentTraffic
from planner.replay.fleet import Fleet
from planner.replay.inflight import InflightRequest
from planner.replay.options import ReplayOptions
from planner.replay.record import RequestEnd
from planner.replay.spec import FleetSpec, GroupKind
from planner.traces.access import LoggedRequest, arrived_s
from policies import registry
from policies.admission.admission import WaitQueueLimits
from policies.admission.fairness import FairShares
from policies.auto.decider import Action, PolicyDecider
from policies.auto.estimates import PolicyMember

REQUESTS = 3_000
INTERVAL, WINDOW, COUNTED_FROM = 1 / 6, 1 / 4, 1 / 2
"""Shares of the replay (0 to 1): time between comparisons, time replayed by one, and time after
which requests count."""

MOST_REPLAYED = 4_000


class AutoResult(msgspec.Struct, frozen=True):
    """The result of one workload: attainment of each policy alone and of auto, over the counted
    requests.

    decisions  the action, the policy and the reason of each comparison
    """

    seed: str
    number: int
    load: float
    start: str
    alone: dict[str, float]
    auto: float
    decisions: list[tuple[str, str, str]]
    cpu_s: float

    @property
    def ratio(self) -> float:
        best = max(self.alone.values())
        return self.auto / best if best else 1.0


class LoggedFleet(Fleet):
    """A replay that records its requests in an access log, and whose policy may be replaced while
    it runs.
    """

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
    """Return the fleet as a configuration describes it: labels, layouts and KV sizes."""
    kinds = tuple(
        GroupKind(
            kind.model,
            kind.labelled_gpu or kind.gpu,
            kind.tp,
            role=kind.role,
            kv_tokens=kind.capacity_tokens,
        )
        for kind in spec.groups
    )
    return FleetSpec(spec.name, kinds, split=spec.split, pairs=spec.pairs)


def measure(seed: str, number: int, portfolio: Sequence[str]) -> AutoResult:
    began = process_time()
    workload = msgspec.structs.replace(draw(seed, number), requests=REQUESTS)
    case = build_case_of(workload, 0)
    load = Attainments(case, portfolio[0]).capacity(0.9, 0)
    load = STEP ** round(log(max(load, 1 / 30)) / log(STEP))
    alone = {policy: _run(case, load, policy, ())[0] for policy in portfolio}
    start = min(alone, key=alone.__getitem__)
    attained, decisions = _run(case, load, start, portfolio)
    return AutoResult(seed, number, load, start, alone, attained, decisions, process_time() - began)


def _run(
    case: Case, load: float, start: str, portfolio: Sequence[str]
) -> tuple[float, list[tuple[str, str, str]]]:
    # Return the attainment over the counted requests, and the decisions of comparisons.
    traffic = case.at(load)
    span_s = case.horizon_s or max(request.arrival_s for request in traffic.arrivals)
    options = ReplayOptions(
        seed=case.arrivals, learns_lengths=True, standard=case.slo, horizon_s=case.horizon_s
    )
    fleet = LoggedFleet(case.fleet, traffic, registry.build(start, {}), None, options)
    fleet.lines = []
    chooser = _Chooser(case, fleet, start, portfolio, span_s)
    if portfolio:
        for index in range(1, round(1 / INTERVAL)):
            fleet.schedule(index * INTERVAL * span_s, chooser.compare)
    run = fleet.run()
    counted = [record for record in run.records if record.arrived_s >= COUNTED_FROM * span_s]
    counted = [record for record in counted if record.end is not RequestEnd.CUT]
    good = sum(record.is_good for record in counted) / len(counted) if counted else 0.0
    return good, chooser.decisions


class _Chooser:
    def __init__(
        self, case: Case, fleet: LoggedFleet, start: str, portfolio: Sequence[str], span_s: float
    ) -> None:
        self._fleet, self._span_s = fleet, span_s
        self._policy, self._since_s = start, 0.0
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
        from_s = max(0.0, now - WINDOW * self._span_s)
        begins_s = max(0.0, now - 2 * WINDOW * self._span_s)
        lines = sorted(
            (line for line in self._fleet.lines if arrived_s(line) >= begins_s), key=arrived_s
        )
        if not lines:
            return
        lately = RecentTraffic(lines, arrived_s(lines[0]), max(from_s, arrived_s(lines[0])))
        lately = limit_traffic(lately, from_s, MOST_REPLAYED)
        names = [PolicyMember(self._policy)]
        names += [member for member in self._portfolio if member.label != self._policy]
        estimate = evaluate(self._case, names, self._endpoints, lately, self._since_s)
        virtual_s = now / self._span_s * 1800.0  # the replay stands for half an hour
        decision = self._decider.decide(virtual_s, estimate, may_switch=True)
        self.decisions.append((str(decision.action), decision.member, decision.reason))
        if decision.action is Action.SWITCH:
            self._decider.on_switched(virtual_s, self._policy)
            self._policy, self._since_s = decision.member, now
            self._fleet.gateway.policy = registry.build(decision.member, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", default="development", help="seed from which all workloads are drawn"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first workload to run")
    parser.add_argument(
        "--count", type=int, default=20, help="number of workloads to run (default: %(default)s)"
    )
    parser.add_argument(
        "--portfolio",
        default=",".join(DEFAULT_PORTFOLIO),
        help="policies that the pool may choose from, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file to which results are appended, one JSON object per line",
    )
    args = parser.parse_args()
    ratios = []
    for number in range(args.first, args.first + args.count):
        if draw(args.seed, number).split != "none":
            print(f"{number}: split fleet, left out")
            continue
        result = measure(args.seed, number, args.portfolio.split(","))
        with args.out.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        ratios.append(result.ratio)
        last = result.decisions[-1] if result.decisions else ()
        print(
            f"{number}: {result.ratio:.3f} of the best; {result.start} alone "
            f"{min(result.alone.values()):.3f}, best {max(result.alone.values()):.3f}, "
            f"auto {result.auto:.3f}; {[decision[0] for decision in result.decisions]} {last}",
            flush=True,
        )
    ratios.sort()
    share = sum(ratio >= 0.985 for ratio in ratios) / len(ratios)
    print(f"{len(ratios)} workloads: least {ratios[0]:.3f}, {share:.0%} at 0.985 or more")


if __name__ == "__main__":
    main()
