"""Estimates how well each routing policy would have served the requests of an access log.

All policies are replayed on the same arrivals, so that their results differ only because of the
policies. The error of a difference is computed from blocks of consecutive requests. The best
policies are replayed a second time with arrivals moved by milliseconds, because routing amplifies
such small changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean

import msgspec

from planner.auto.calibrate import calibrate
from planner.auto.cpu_budget import OnProgress
from planner.auto.mean_error import error_of_mean, in_blocks
from planner.auto.reproduction import ServedRequest, find_doubt, from_line, from_record, goodput
from planner.plan.config_to_replay import PoolCase
from planner.plan.recent_traffic import RecentTraffic
from planner.replay.fleet_sim import replay
from planner.replay.results import ReplayRecord
from planner.replay.traffic import Traffic
from planner.traces.access_log import LoggedRequest, arrived_s
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry
from policies.auto.replay_messages import MemberEstimate, PolicyMember, PoolEstimate

JITTER_S = 0.005
"""Standard deviation, in seconds, of the random shift of each arrival in the second replay."""


def evaluate(
    case: PoolCase,
    members: Sequence[PolicyMember],
    endpoints: Sequence[str],
    lately: RecentTraffic,
    in_force_since_s: float = 0.0,
    on_progress: OnProgress | None = None,
) -> PoolEstimate:
    """Estimate each routing policy's goodput by replaying the recent requests of the pool.

    case              the pool's configuration for a replay
    members           the policies to compare; the current policy is first
    endpoints         names of the pool's endpoints in the log, in order
    lately            the recent requests
    in_force_since_s  Unix time since which the current policy has routed all requests. Only later
                      requests are used to check the replay of this policy against the log
    on_progress       called during replays
    """
    requests = lately.requests(case.models)
    case = calibrate(case, endpoints, lately, on_progress)
    runs = _Runs(case, requests, lately, on_progress)
    incumbent = members[0]
    labels = [member.label for member in members]
    if not requests or not runs.records(incumbent, 0):
        empty = tuple(MemberEstimate(label, 0.0) for label in labels)
        return PoolEstimate(case.pool, labels[0], 0, 0.0, "", empty)
    records = runs.records(incumbent, 0)
    logged, replayed = _served_by_incumbent(case, lately, records, in_force_since_s)
    doubt = find_doubt(logged, replayed)
    until_s = min(lately.until_s, arrived_s(lately.lines[-1]))
    span_s = records[-1].arrived_s - records[0].arrived_s
    # With a doubt nothing will be decided, so the others need not be replayed.
    alone = [MemberEstimate(labels[0], goodput(records))]
    estimates = alone if doubt else _compare(runs, members, goodput(logged))
    return PoolEstimate(
        case.pool, labels[0], len(records), span_s, doubt, tuple(estimates), until_s
    )


def _compare(runs: _Runs, members: Sequence[PolicyMember], logged: float) -> list[MemberEstimate]:
    # `logged` is the goodput of the incumbent in the log. Gains are over this if the replay of the
    # incumbent is worse than the log.
    incumbent, others = members[0], members[1:]
    by_label = {member.label: member for member in others}
    estimates = [_estimate(runs, member, incumbent, (0,), logged) for member in others]
    best = max(estimates, key=lambda estimate: estimate.gain, default=None)
    if best is not None and best.gain > 0:
        again = _estimate(runs, by_label[best.member], incumbent, (0, 1), logged)
        estimates = [again if estimate is best else estimate for estimate in estimates]
    return [MemberEstimate(incumbent.label, goodput(runs.records(incumbent, 0))), *estimates]


def _estimate(
    runs: _Runs,
    member: PolicyMember,
    incumbent: PolicyMember,
    seeds: Sequence[int],
    logged: float,
) -> MemberEstimate:
    own = [runs.records(member, seed) for seed in seeds]
    other = [runs.records(incumbent, seed) for seed in seeds]
    mean, reference = fmean(map(goodput, own)), fmean(map(goodput, other))
    less = max(0.0, logged - reference)
    differences = [
        fmean(of_seeds) - less
        for of_seeds in zip(
            *(_block_gains(mine, theirs) for mine, theirs in zip(own, other, strict=True)),
            strict=True,
        )
    ]
    gain = mean - reference - less
    error = error_of_mean(differences)
    return MemberEstimate(member.label, mean, gain, error, tuple(differences))


class _Runs:
    """Replays one pool's requests with different routing policies, and caches the results.

    A policy is replayed when its result is first needed.
    """

    def __init__(
        self,
        case: PoolCase,
        requests: Sequence[TraceRequest],
        lately: RecentTraffic,
        on_progress: OnProgress | None,
    ) -> None:
        self._case, self._requests, self._lately = case, requests, lately
        self._on_progress = on_progress
        self._known: dict[tuple[str, int], list[ReplayRecord]] = {}

    def records(self, member: PolicyMember, seed: int) -> list[ReplayRecord]:
        """Return the counted requests, by arrival, as a replay with one policy served them.

        The same requests count for all policies. The replay runs only at the first call.

        member  the policy and its parameters
        seed    random seed of the replay
        """
        key = member.label, seed
        if key not in self._known:
            case = self._case
            run = replay(
                case.fleet,
                Traffic(arrivals=self._arrivals(seed)),
                policy_registry.build(member.policy, member.parameters),
                case.admission(),
                case.options(seed),
                case.limits,
                case.shares,
                self._on_progress,
            )
            self._known[key] = [
                record
                for record in run.records
                if self._lately.counts(self._lately.begins_s + record.arrived_s)
            ]
        return self._known[key]

    def _arrivals(self, seed: int) -> list[TraceRequest]:
        if not seed:
            return list(self._requests)
        rng = Random(f"auto {seed}")
        return [
            msgspec.structs.replace(
                request, arrival_s=max(0.0, request.arrival_s + rng.gauss(0.0, JITTER_S))
            )
            for request in self._requests
        ]


def _block_gains(own: Sequence[ReplayRecord], other: Sequence[ReplayRecord]) -> list[float]:
    # Return the differences in goodput of blocks of consecutive requests.
    return [
        goodput(mine) - goodput(theirs)
        for mine, theirs in zip(in_blocks(own), in_blocks(other), strict=True)
    ]


def _served_by_incumbent(
    case: PoolCase,
    lately: RecentTraffic,
    records: Sequence[ReplayRecord],
    in_force_since_s: float,
) -> tuple[list[ServedRequest], list[ServedRequest]]:
    # Return the requests that the policy in force routed, as the log and the replay served them.
    from_s = max(lately.from_s, in_force_since_s)
    lines = [
        line
        for line in lately.lines
        if from_s <= arrived_s(line) < lately.until_s
        and (case.models is None or line.model in case.models)
    ]
    logged = [served for line in lines if (served := _served(line, case)) is not None]
    replayed = [
        from_record(record) for record in records if record.arrived_s >= from_s - lately.begins_s
    ]
    return logged, replayed


def _served(line: LoggedRequest, case: PoolCase) -> ServedRequest | None:
    return from_line(line, case.classes.get(line.slo, case.standard))


def portfolio(incumbent: PolicyMember, members: Sequence[PolicyMember]) -> tuple[PolicyMember, ...]:
    """Return the routing policies that a comparison should try: first the current one, then others.

    incumbent  the current policy
    members    the configured policies; the current one may be among them
    """
    return (incumbent, *(member for member in members if member.label != incumbent.label))
