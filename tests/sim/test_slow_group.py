"""Tests that every policy detects a slow engine among four, and sends it little work.

The load is half of what three healthy engines serve.
"""

from __future__ import annotations

from random import Random
from statistics import quantiles
from typing import NamedTuple

import msgspec
import pytest

from planner.replay import FleetSpec, GroupKind, ReplayOptions, traffic
from planner.replay.fleet_sim import Fleet
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_options import GroupFault, GroupFaultKind
from planner.replay.results import ReplayRun
from planner.traces import TraceRequest
from policies import policy_registry
from policies.admission.wait_queue import WaitQueue
from policies.admission_registry import build_admission

GROUP = GroupKind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=600_000)
KEPT_S = 10.0
HEDGES = 0.05


class Load(NamedTuple):
    per_s: float = 8.8
    median: float = 7.6
    spread: float = 0.8


SHORT = Load(12.0, 7.3, 0.45)


def requests(
    seed: int, seconds: float, per_s: float = 8.8, median: float = 7.6, spread: float = 0.8
) -> list[TraceRequest]:
    # Return chat requests with Poisson arrivals; three engines serve about 17.6 per second.
    rng, now, results = Random(seed), 0.0, []
    while (now := now + rng.expovariate(per_s)) < seconds:
        prompt = round(rng.lognormvariate(median, spread))
        keys = tuple(rng.randrange(1 << 40) for _ in range(prompt // 512))
        results.append(
            TraceRequest(now, max(16, prompt), max(2, round(rng.lognormvariate(4.9, 0.6))), keys)
        )
    return results


def ran(
    policy: str,
    groups: int,
    seed: int,
    seconds: float,
    fault: GroupFault | None = None,
    load: Load | None = None,
) -> tuple[ReplayRun, Fleet]:
    spec = FleetSpec("four", (msgspec.structs.replace(GROUP, count=groups),))
    options = ReplayOptions(
        slow_factor=2.5, hedge_share=HEDGES, faults=() if fault is None else (fault,)
    )
    fleet = Fleet(
        spec,
        traffic(requests(seed, seconds, *(load or Load()))),
        policy_registry.build(policy, {}),
        None,
        options,
    )
    return fleet.run(), fleet


def hedges(
    kinds: tuple[GroupKind, ...], policy: str, seed: int, per_s: float, seconds: float = 60.0
) -> float:
    result, options = (
        traffic(requests(seed, seconds, per_s)),
        ReplayOptions(slow_factor=2.5, hedge_share=HEDGES),
    )
    fleet = Fleet(
        FleetSpec("pool", kinds), result, policy_registry.build(policy, {}), None, options
    )
    run = fleet.run()
    assert fleet.speed_monitor.ejected == []
    return len(fleet.hedges.sent) / len(run.records)


def share(run: ReplayRun, from_s: float) -> float:
    late = [record for record in run.records if record.arrived_s >= from_s]
    return sum(record.group == "tp0" for record in late) / len(late)


def p99_s(run: ReplayRun) -> float:
    return quantiles([record.ttft_s for record in run.records if record.ttft_s is not None], n=100)[
        98
    ]


@pytest.mark.parametrize("policy", policy_registry.names())
def test_a_group_ten_times_slower_gets_almost_no_requests_after_ten_seconds(policy: str) -> None:
    run, _ = ran(policy, 4, 1, 60.0, GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=10.0))
    assert all(record.first_s is not None for record in run.records)
    assert share(run, KEPT_S) <= 0.01


@pytest.mark.parametrize("seed", [825, 827, 838])
def test_a_group_that_is_slow_at_prompts_is_found_although_its_policy_sends_it_few(
    seed: int,
) -> None:
    fault = GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=3.0, only="prefill")
    run, fleet = ran("priced", 4, seed, 60.0, fault)
    assert [group for _, group in fleet.speed_monitor.ejected] == [0]
    assert share(run, KEPT_S) <= 0.01


def test_late_requests_are_hedged_only_to_groups_with_free_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At times all groups are at their limits.
    limit = 8
    kinds = (msgspec.structs.replace(GROUP, count=4, max_concurrency=limit),)
    fleet = Fleet(
        FleetSpec("four", kinds),
        traffic(requests(1, 45.0, 14.0, 7.3, 0.45)),
        policy_registry.build("prefix_aware", {}),
        WaitQueue(build_admission("cap", {})),
        ReplayOptions(
            slow_factor=2.5,
            hedge_share=HEDGES,
            faults=(GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=10.0),),
        ),
    )
    loads: list[int] = []
    send = fleet.hedges.send

    def record_load(now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        loads.append(group.load.in_flight)
        send(now, inflight, group)

    monkeypatch.setattr(fleet.hedges, "send", record_load)
    fleet.run()
    assert loads
    assert max(loads) < limit


def test_streams_that_pause_for_an_abandoned_step_are_no_evidence() -> None:
    # Two groups always take twice as long. A prompt leaves one of them behind an abandoned step.
    kinds = (
        msgspec.structs.replace(GROUP, count=2, slowness=2.0),
        msgspec.structs.replace(GROUP, count=2),
    )
    assert hedges(kinds, "priced", 703, 8.8) <= HEDGES


@pytest.mark.parametrize("policy", policy_registry.names())
def test_the_first_seconds_with_a_slow_group_are_as_with_the_other_three_alone(policy: str) -> None:
    # 45 s of short prompts. Even five requests that wait for the slow engine would be too many.
    three, _ = ran(policy, 3, 1, 45.0, load=SHORT)
    run, fleet = ran(
        policy, 4, 1, 45.0, GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=10.0), SHORT
    )
    assert p99_s(run) <= 2.0 * p99_s(three)
    assert share(run, KEPT_S) <= 0.01
    assert 0 < len(fleet.hedges.sent) <= HEDGES * len(run.records)
    assert all(group == 0 for _, group in fleet.speed_monitor.ejected)


@pytest.mark.parametrize("policy", ["round_robin", "llumnix", "prefix_aware", "priced"])
def test_first_tokens_come_as_with_the_other_three_alone(policy: str) -> None:
    # The slow engine delays requests of the first seconds only, so in a longer run they would be
    # fewer than one in a hundred.
    three, _ = ran(policy, 3, 11, 120.0)
    run, _ = ran(policy, 4, 11, 120.0, GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=10.0))
    assert p99_s(run) <= 2.0 * p99_s(three)


@pytest.mark.parametrize("policy", ["round_robin", "sglang_cache_aware"])
def test_late_requests_at_a_suspect_group_are_moved_before_its_ejection(policy: str) -> None:
    run, fleet = ran(policy, 4, 11, 20.0, GroupFault(0.0, 0, GroupFaultKind.SLOW, factor=10.0))
    ejected_s, _ = fleet.speed_monitor.ejected[0]
    assert any(
        record.retries and record.first_s is not None and record.first_s < ejected_s
        for record in run.records
    )


@pytest.mark.parametrize(
    ("factor", "only"), [(3.3, ""), (3.3, "prefill"), (3.3, "decode"), (10.0, "decode")]
)
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_a_group_that_becomes_slow_at_one_thing_is_ejected(
    policy: str, factor: float, only: str
) -> None:
    _, fleet = ran(
        policy, 4, 1, 60.0, GroupFault(20.0, 0, GroupFaultKind.SLOW, factor=factor, only=only)
    )
    assert [group for _, group in fleet.speed_monitor.ejected] == [0]
    # Three times slower at prompts only is near the limit: load-aware policies send it few prompts.
    assert fleet.speed_monitor.ejected[0][0] <= 20.0 + (20.0 if only == "prefill" else 10.0)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware", "priced"])
def test_unequal_groups_are_not_ejected(policy: str) -> None:
    kinds = (
        GroupKind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=600_000, count=2),
        GroupKind("llama-3.1-70b-fp8", "l40s", 4, kv_tokens=300_000, count=2),
    )
    assert hedges(kinds, policy, 2, 3.0) <= HEDGES


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("round_robin", 500),
        ("round_robin", 501),
        ("consistent_hash", 504),
        ("consistent_hash", 507),
    ],
)
def test_a_faster_kind_that_answers_sooner_is_no_evidence(policy: str, seed: int) -> None:
    kinds = (
        GroupKind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=600_000, count=2),
        GroupKind("llama-3.1-70b-fp8", "l40s", 4, kv_tokens=300_000, count=2),
    )
    hedges(kinds, policy, seed, 3.0)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware", "priced"])
@pytest.mark.parametrize(
    ("slowness", "per_s", "seconds"), [(1.0, 8.8, 60.0), (1.0, 40.0, 25.0), (10.0, 1.0, 60.0)]
)
def test_groups_that_are_slow_together_are_neither_hedged_much_nor_ejected(
    policy: str, slowness: float, per_s: float, seconds: float
) -> None:
    # 40 requests per second are 1.7 times what four engines serve, so 25 s leave long queues. All
    # engines are ten times slower in the last case, so that 1 per second is far too much for them.
    kinds = (msgspec.structs.replace(GROUP, count=4, slowness=slowness),)
    assert hedges(kinds, policy, 2, per_s, seconds) <= HEDGES


@pytest.mark.parametrize("policy", ["round_robin", "prefix_aware", "priced"])
def test_a_group_that_takes_twice_as_long_from_the_start_is_not_ejected(policy: str) -> None:
    kinds = (
        msgspec.structs.replace(GROUP, count=3),
        msgspec.structs.replace(GROUP, count=1, slowness=2.0),
    )
    assert hedges(kinds, policy, 21, 8.8) <= HEDGES


@pytest.mark.parametrize("policy", ["round_robin", "prefix_aware", "priced"])
def test_a_group_that_is_fast_again_gets_requests_again(policy: str) -> None:
    run, fleet = ran(
        policy, 4, 3, 60.0, GroupFault(10.0, 0, GroupFaultKind.SLOW, duration_s=20.0, factor=10.0)
    )
    assert [group for _, group in fleet.speed_monitor.ejected] == [0]
    assert share(run, 45.0) > 0.05
