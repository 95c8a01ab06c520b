"""Corrects the speeds of simulated engines by comparing a replay with the access log.

The log's requests are replayed on the endpoints that served them, so that only the speed of the
engines differs from the log. The ratio of the times per token is the correction of the speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from planner.auto.cpu_budget import OnProgress
from planner.auto.reproduction import from_line, from_record
from planner.plan.config_to_replay import PoolCase
from planner.plan.recent_traffic import RecentTraffic
from planner.replay.fleet_sim import replay
from planner.replay.replay_options import ReplayOptions
from planner.replay.results import ReplayRecord
from planner.replay.traffic import Traffic
from planner.traces.access_log import LoggedRequest, arrived_s
from policies.policy_types import Picker, Policy, WeightedScorer
from policies.routing_types import Candidate, Role, RoutingQuery
from policies.scorers import constant

LEAST_SAMPLES = 20
"""Minimum number of requests from which an endpoint's own speed is derived.

With fewer, the median speed of the other endpoints is used.
"""

SLOWEST, FASTEST = 10.0, 0.1
CLOSE = 0.05
"""Smallest relative change of a speed that counts (0.05 is 5 %).

When a replay has changed every estimated speed by less, the speeds have converged: the replays end.
"""

ROUNDS = 3
"""Maximum number of replays for the correction of speeds.

Several are needed because a slower engine has more concurrent requests, which make it slower again.
"""


def calibrate(
    case: PoolCase,
    endpoints: Sequence[str],
    lately: RecentTraffic,
    on_progress: OnProgress | None = None,
) -> PoolCase:
    """Return the case with the speed of its simulated engines corrected by an access log.

    case         the pool's configuration for a replay
    endpoints    names of its endpoints in the log, in order
    lately       the recent requests of the log
    on_progress  called during replays

    A case with separate prefill and decode engines is returned unchanged.
    """
    kinds = case.fleet.groups
    is_split = case.fleet.pairs or any(kind.role is not Role.BOTH for kind in kinds)
    if is_split or len(endpoints) != len(kinds):
        return case
    pairs = lately.pairs(case.models)
    slots = {name: slot for slot, name in enumerate(endpoints)}
    slowness = [kind.slowness for kind in kinds]
    for _ in range(ROUNDS):
        corrected = _with_slowness(case, slowness)
        logged_slots = [slots.get(line.endpoint) for line, _ in pairs]
        run = replay(
            corrected.fleet,
            Traffic(arrivals=[request for _, request in pairs]),
            _as_logged(logged_slots),
            None,
            ReplayOptions(learns_lengths=True, standard=case.standard, classes=case.classes),
            watch=on_progress,
        )
        counted = [
            sample
            for sample in zip((line for line, _ in pairs), run.records, logged_slots, strict=True)
            if lately.counts(arrived_s(sample[0]))
        ]
        factors = _factors(case, counted, len(kinds))
        slowness = [
            min(SLOWEST, max(FASTEST, old * factor))
            for old, factor in zip(slowness, factors, strict=True)
        ]
        if all(abs(factor - 1) <= CLOSE for factor in factors):
            break
    return _with_slowness(case, slowness)


def _factors(
    case: PoolCase,
    counted: Sequence[tuple[LoggedRequest, ReplayRecord, int | None]],
    count: int,
) -> list[float]:
    # Return the ratio of logged to replayed time per token of each endpoint.
    ratios: Mapping[int, list[float]] = defaultdict(list)
    for line, record, slot in counted:
        logged = from_line(line, case.standard)
        replayed = from_record(record)
        if slot is not None and logged is not None and logged.tpot_s and replayed.tpot_s:
            ratios[slot].append(logged.tpot_s / replayed.tpot_s)
    known = {
        slot: median(of_slot) for slot, of_slot in ratios.items() if len(of_slot) >= LEAST_SAMPLES
    }
    usual = median(known.values()) if known else 1.0
    return [known.get(slot, usual) for slot in range(count)]


def _with_slowness(case: PoolCase, slowness: Sequence[float]) -> PoolCase:
    change = msgspec.structs.replace
    kinds = tuple(
        change(kind, slowness=factor)
        for kind, factor in zip(case.fleet.groups, slowness, strict=True)
    )
    return change(case, fleet=change(case.fleet, kinds=kinds))


def _as_logged(logged_slots: Sequence[int | None]) -> Policy:
    # Return the policy that sends each request where the log says it was served.
    def pick(query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        slot = logged_slots[int(query.request.id)]
        for index, candidate in enumerate(candidates):
            if candidate.load.slot == slot:
                return index
        return min(range(len(scores)), key=lambda index: candidates[index].load.in_flight)

    picker: Picker = pick
    return Policy("as_logged", (), (WeightedScorer(constant()),), picker)
