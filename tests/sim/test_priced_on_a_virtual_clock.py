"""Tests of the policy `priced` against other routing rules, on short simulated traffic.

The limits are wide, because short runs vary. Published results come from `make goodput`.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from random import Random

import msgspec
import pytest

from bench.load.overload_plan import GROUP, SLO, Phase, arrivals, trace_request
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRun, replay, traffic
from planner.replay.results import ReplayFigures, figures
from planner.traces.b2b import b2b
from planner.traces.mix import scale_rate
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.pricing.split_decision import SplitRule
from policies.routing_types import STANDARD
from tests.sim import conversation as excerpt

H100 = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=4, kv_tokens=600_000)


@cache
def conversation(speed: float) -> tuple[TraceRequest, ...]:
    return tuple(scale_rate(excerpt.conversation(700), speed))


def ran(
    policy: str, requests: tuple[TraceRequest, ...], spec: FleetSpec, tpot_s: float = 0.1
) -> ReplayRun:
    options = ReplayOptions(standard=msgspec.structs.replace(STANDARD, tpot_s=tpot_s))
    return replay(spec, traffic(requests), policy_registry.build(policy, {}), options=options)


def fared(
    policy: str, requests: tuple[TraceRequest, ...], spec: FleetSpec, tpot_s: float = 0.1
) -> ReplayFigures:
    return figures(ran(policy, requests, spec, tpot_s), 20.0)


@cache
def attainment_of_a_busy_fleet(policy: str) -> float:
    return fared(policy, conversation(1.35), FleetSpec("four", (H100,))).attainment


@pytest.mark.parametrize("rival", ["llmd_blend", "prefix_aware", "least_loaded"])
def test_a_busy_fleet_meets_as_many_slos_as_under_any_cache_aware_reference_policy(
    rival: str,
) -> None:
    assert attainment_of_a_busy_fleet("priced") >= 0.97 * attainment_of_a_busy_fleet(rival)


def test_shared_prefixes_hit_the_cache_and_groups_stay_balanced() -> None:
    shares = fared(
        "priced",
        tuple(b2b(3.0, 90.0, 1)),
        FleetSpec("three", (GroupKind("qwen3-32b", "h100", 2, count=3),)),
    )
    assert shares.of_ideal is not None
    assert shares.of_ideal > 0.85
    assert shares.imbalance < 1.25


def test_a_slow_group_gets_less_work_without_a_declared_speed() -> None:
    slow = msgspec.structs.replace(H100, count=1, slowness=3.0)
    run = ran(
        "priced",
        conversation(0.9),
        FleetSpec("one slow", (msgspec.structs.replace(H100, count=3), slow)),
    )
    *sisters, last = [group.prompt_tokens - group.cached_tokens for group in run.groups]
    assert last < 0.7 * min(sisters)


def test_an_unobserved_endpoint_of_a_slow_fleet_is_not_flooded() -> None:
    names = count(PRIVATE)
    requests = [
        trace_request(arrival.prompt_tokens, arrival.output_tokens, arrival.due_s, names)
        for arrival in arrivals((Phase("all at once", 20.0, 1.0),), 30.0, 1)
    ]
    options = ReplayOptions(expected_output=None, standard=SLO)
    run = replay(
        FleetSpec("slow", (GROUP,), block_tokens=16),
        traffic(requests),
        policy_registry.build("priced", {}),
        options=options,
    )
    assert figures(run).attainment > 0.98
    assert max(group.requests for group in run.groups) < 1.8 * len(requests) / len(run.groups)


def test_with_a_tight_tpot_budget_groups_specialize_and_meet_more_slos() -> None:
    whole = FleetSpec("whole", (H100,))
    pairs = msgspec.structs.replace(whole, pairs=True)
    requests = conversation(0.8)
    together, apart = (ran("priced", requests, spec, 0.02) for spec in (whole, pairs))
    assert figures(apart, 20.0).attainment > 1.05 * figures(together, 20.0).attainment
    computed = sorted(group.prompt_tokens for group in apart.groups)
    assert computed[0] < 0.5 * computed[-1]
    assert any(record.prefilled_by for record in apart.records)


def test_pulled_prefixes_are_found_where_they_are_believed() -> None:
    names = count(PRIVATE)
    documents = [tuple(next(names) for _ in range(32)) for _ in range(12)]
    rng = Random(7)
    requests, now_s = [], 0.0
    for _ in range(300):
        now_s += rng.expovariate(14.0)
        blocks = (*rng.choice(documents[: rng.randint(1, 12)]), next(names))
        requests.append(TraceRequest(now_s, 33 * 512, 150, blocks))
    kind = msgspec.structs.replace(H100, link_gb_s=12.5)
    pairs = FleetSpec("pairs", (kind,), pairs=True, split=SplitRule(1))
    run = ran("priced", tuple(requests), pairs)
    assert sum(bool(record.prefilled_by) for record in run.records) > 20
    believed = sum(record.believed_tokens or 0 for record in run.records)
    cached = sum(record.cached_tokens or 0 for record in run.records)
    assert believed - cached < 0.01 * believed
