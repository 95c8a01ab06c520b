"""Tests of the simulator: requests end once, and equal seeds give equal results."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.replay import (
    CacheView,
    ClientBehaviour,
    FleetSpec,
    GroupFault,
    GroupFaultKind,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    RequestEnd,
    Traffic,
    replay,
    traffic,
)
from planner.replay.fleet_sim import Fleet
from planner.traces import TraceRequest
from policies import load_ledger, policy_registry
from policies.admission.admission_policy import WaitQueueLimits
from policies.admission.wait_queue import WaitQueue
from policies.admission_registry import build_admission
from policies.routing_types import Request, Role

H100 = GroupKind("llama-3.1-70b-fp8", "h100", 4, kv_tokens=100_000)
TWO = FleetSpec("two", (msgspec.structs.replace(H100, count=2),))


def some(
    count: int = 40, every_s: float = 0.2, prompt: int = 3000, output: int = 60
) -> list[TraceRequest]:
    return [
        TraceRequest(
            number * every_s,
            prompt + 7 * number,
            output + number,
            (*range(number % 4 * 10, number % 4 * 10 + 4), 10**6 + number, 10**7 + number),
        )
        for number in range(count)
    ]


def ran(
    requests: list[TraceRequest] | Traffic,
    spec: FleetSpec = TWO,
    policy: str = "prefix_aware",
    admission: str | None = None,
    limits: WaitQueueLimits | None = None,
    **options: object,
) -> ReplayRun:
    load = requests if isinstance(requests, Traffic) else traffic(requests)
    gate = None if admission is None else build_admission(admission, {})
    return replay(
        spec, load, policy_registry.build(policy, {}), gate, ReplayOptions(**options), limits
    )  # type: ignore[arg-type]


def told(run: ReplayRun) -> list[tuple[object, ...]]:
    return [
        (
            record.group,
            record.cached_tokens,
            record.first_s,
            record.done_s,
            record.end,
            record.refusals,
            record.predicted_ttft_s,
        )
        for record in run.records
    ]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_an_equal_seed_gives_an_equal_run(policy: str) -> None:
    assert told(ran(some(), policy=policy, seed=3)) == told(ran(some(), policy=policy, seed=3))


@given(
    rate=st.floats(0.5, 60.0),
    output=st.integers(1, 200),
    admission=st.sampled_from([None, "cap"]),
    retries=st.integers(0, 2),
    obeys_retry_after=st.booleans(),
    patience_s=st.sampled_from([None, 0.5, 3.0]),
    lost_at_s=st.sampled_from([None, 0.3, 2.0]),
    back_s=st.sampled_from([None, 1.0]),
    split=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_arrival_ends_exactly_once_and_everything_is_given_back(
    rate: float,
    output: int,
    admission: str | None,
    retries: int,
    obeys_retry_after: bool,
    patience_s: float | None,
    lost_at_s: float | None,
    back_s: float | None,
    split: bool,
) -> None:
    kinds = (msgspec.structs.replace(H100, count=2, max_concurrency=4),)
    if split:
        kinds = tuple(
            msgspec.structs.replace(H100, count=2, role=role, max_concurrency=6)
            for role in (Role.PREFILL, Role.DECODE)
        )
    faults = (
        ()
        if lost_at_s is None
        else tuple(GroupFault(lost_at_s, group, duration_s=back_s) for group in (0, len(kinds)))
    )
    run = ran(
        some(30, 1 / rate, output=output),
        FleetSpec("some", kinds),
        admission=admission,
        limits=WaitQueueLimits(size=5, timeout_s=2.0),
        clients=ClientBehaviour(retries, obeys_retry_after, patience_s),
        faults=faults,
    )
    assert len(run.records) == 30
    for record in run.records:
        assert record.end in (RequestEnd.SERVED, RequestEnd.SHED, RequestEnd.LOST, RequestEnd.LEFT)
        assert (record.done_s is not None) == (record.end is RequestEnd.SERVED)
        assert (
            record.first_s is None
            or record.done_s is None
            or record.arrived_s < record.first_s <= record.done_s
        )


def test_engines_queue_admitted_requests_while_hedges_occupy_all_places() -> None:
    kinds = (msgspec.structs.replace(H100, count=2, max_concurrency=2),)
    fleet = Fleet(
        FleetSpec("two", kinds),
        traffic(some(12, every_s=0.02)),
        policy_registry.build("prefix_aware", {}),
        WaitQueue(build_admission("cap", {})),
        ReplayOptions(),
    )
    for group in fleet.groups:  # hedges have no permit
        load_ledger.reserve(group.load, Request("hedge", "model", "", 10, 10), 0, 0.0)
    assert {record.end for record in fleet.run().records} == {RequestEnd.SERVED}


def test_leaping_and_stepping_give_the_same_run_within_a_thousandth() -> None:
    requests = some(60, 0.05, output=300)
    leapt, stepped = ran(requests), ran(requests, merges_steps=False)
    assert [record.group for record in leapt.records] == [
        record.group for record in stepped.records
    ]
    for record, other in zip(leapt.records, stepped.records, strict=True):
        assert record.ttft_s == pytest.approx(other.ttft_s, rel=1e-3)
        assert record.tpot_s == pytest.approx(other.tpot_s, rel=1e-3)
        assert record.longest_gap_s == pytest.approx(other.longest_gap_s, rel=2e-3)
    assert sum(group.steps for group in leapt.groups) == sum(
        group.steps for group in stepped.groups
    )


def test_loads_are_back_at_nothing_when_all_is_over() -> None:
    from planner.replay.fleet_sim import Fleet

    fleet = Fleet(
        TWO, traffic(some()), policy_registry.build("prefix_aware", {}), None, ReplayOptions()
    )
    fleet.run()
    for group in fleet.groups:
        load = group.load
        assert (load.in_flight, load.prefill_tokens, load.decode_tokens, load.expected_tokens) == (
            0,
            0,
            0,
            0,
        )
        assert not group.expected_keys
        assert group.engine.scheduler.pool.usage == 0


def test_a_lost_group_breaks_answers_and_sends_those_without_a_token_elsewhere() -> None:
    run = ran(some(30, 0.02, output=400), faults=(GroupFault(0.5, 0, duration_s=5.0),))
    ends = {record.end for record in run.records}
    assert ends == {RequestEnd.SERVED, RequestEnd.LOST}
    assert any(
        record.retries and record.end is RequestEnd.SERVED and record.group == "tp1"
        for record in run.records
    )
    assert all(
        record.first_s is not None for record in run.records if record.end is RequestEnd.LOST
    )


def test_a_drained_group_gets_nothing_new_ends_what_it_has_and_comes_back_with_its_cache() -> None:
    run = ran(some(60, 0.2, output=400), faults=(GroupFault(3.0, 0, GroupFaultKind.DRAIN, 4.0),))
    assert {record.end for record in run.records} == {RequestEnd.SERVED}
    mine = [record for record in run.records if record.group == "tp0"]
    assert any(record.arrived_s < 3.0 < (record.done_s or 0.0) for record in mine)
    assert not [record for record in mine if 3.0 <= record.arrived_s < 7.0]
    assert [record for record in mine if record.arrived_s >= 7.0 and record.cached_tokens]


def test_a_cold_group_gets_nothing_before_it_joins_and_its_share_after() -> None:
    spec = FleetSpec("cold", (H100, msgspec.structs.replace(H100, up_at_s=4.0)))
    run = ran(some(60, 0.2), spec, policy="least_loaded")
    joined = [record for record in run.records if record.group == "tp1"]
    assert joined
    assert min(record.arrived_s for record in joined) >= 4.0


def test_a_slow_fault_lasts_as_long_as_configured() -> None:
    quick = ran(some(10, 2.0), policy="round_robin")
    slow = ran(
        some(10, 2.0),
        policy="round_robin",
        faults=(GroupFault(0.0, 0, GroupFaultKind.SLOW, 9.9, 3.0),),
    )
    stretch = [b.tpot_s / a.tpot_s for a, b in zip(quick.records, slow.records, strict=True)]  # type: ignore[operator]
    assert stretch == pytest.approx([3, 1, 3, 1, 3, 1, 1, 1, 1, 1], rel=1e-6)


def test_a_slowness_ends_without_ending_another_that_began_meanwhile() -> None:
    spec = FleetSpec("one", (H100,))
    slow = (
        GroupFault(0.0, 0, GroupFaultKind.SLOW, 25.0, 3.0),
        GroupFault(15.0, 0, GroupFaultKind.SLOW, 34.0, 5.0),
    )
    quick, slowed = ran(some(6, 10.0), spec), ran(some(6, 10.0), spec, faults=slow)
    stretch = [b.tpot_s / a.tpot_s for a, b in zip(quick.records, slowed.records, strict=True)]  # type: ignore[operator]
    assert stretch == pytest.approx([3, 3, 5, 5, 5, 1], rel=1e-6)


def test_the_exact_view_believes_what_the_engine_finds() -> None:
    run = ran(some(40, 1.0), view=CacheView.EXACT)
    assert [record.believed_tokens for record in run.records] == [
        record.cached_tokens for record in run.records
    ]
    assert (
        sum(record.cached_tokens for record in run.records)
        == sum(record.ideal_tokens for record in run.records)
        > 0
    )


def test_cached_answers_evict_prompts_that_come_again() -> None:
    # The repeated prompt takes 6 of 40 blocks. Each of the eight answers in between takes 8 more.
    again = [TraceRequest(60.0 * n, 600, 8, tuple(range(6)), block_tokens=100) for n in (0, 9)]
    others = [TraceRequest(60.0 * n, 100, 800, (1000 + n,), block_tokens=100) for n in range(1, 9)]
    kind = msgspec.structs.replace(H100, kv_tokens=4000)
    plain = FleetSpec("one", (kind,), block_tokens=100)
    cached = {
        spec.caches_answers: ran([again[0], *others, again[1]], spec).records[-1].cached_tokens
        for spec in (plain, msgspec.structs.replace(plain, caches_answers=True))
    }
    assert cached == {False: 500, True: 0}


def test_the_prefix_index_may_have_other_blocks_than_the_engines() -> None:
    # The second prompt shares 600 tokens, which are no whole block of 512 for the index.
    shared = tuple(range(6))
    requests = [
        TraceRequest(0.0, 900, 8, (*shared, 10, 11, 12), block_tokens=100),
        TraceRequest(9.0, 900, 8, (*shared, 20, 21, 22), block_tokens=100),
    ]
    spec = FleetSpec("one", (H100,), block_tokens=100)
    believed = [
        ran(requests, spec, index_tokens=tokens).records[1].believed_tokens
        for tokens in (None, 200, 400)
    ]
    assert believed == [600, 600, 400]


def test_an_index_without_updates_matches_nothing() -> None:
    assert {record.believed_tokens for record in ran(some(), lost_events=1.0).records} == {0}


def test_obedient_clients_retry_after_the_given_time() -> None:
    spec = FleetSpec("one", (msgspec.structs.replace(H100, max_concurrency=2),))
    room = WaitQueueLimits(size=1, timeout_s=0.5)
    refused = ran(some(12, 0.01), spec, admission="cap", limits=room)
    patient = ran(
        some(12, 0.01), spec, admission="cap", limits=room, clients=ClientBehaviour(retries=5)
    )
    served = [
        sum(record.end is RequestEnd.SERVED for record in run.records) for run in (refused, patient)
    ]
    assert served[0] < served[1]
    assert any(
        record.refusals and record.end is RequestEnd.SERVED and record.ttft_s > 0.4
        for record in patient.records
    )  # type: ignore[operator]


def test_what_fits_nowhere_is_refused_and_what_fits_somewhere_goes_there() -> None:
    spec = FleetSpec("unequal", (msgspec.structs.replace(H100, kv_tokens=4096), H100))
    run = ran(
        [TraceRequest(0.0, 50_000, 10), TraceRequest(0.0, 200_000, 10)], spec, policy="round_robin"
    )
    assert [(record.end, record.group, record.reason) for record in run.records] == [
        (RequestEnd.SERVED, "tp1", ""),
        (RequestEnd.SHED, "", "too_long"),
    ]


def split_fleet(link_gb_s: float) -> FleetSpec:
    half = msgspec.structs.replace(H100, link_gb_s=link_gb_s)
    return FleetSpec(
        "pd",
        tuple(msgspec.structs.replace(half, role=role) for role in (Role.PREFILL, Role.DECODE)),
    )


def test_a_split_request_waits_for_its_kv_to_cross_the_link() -> None:
    record = [TraceRequest(0.0, 8000, 50)]
    (fast,), (slow,) = (
        ran(record, split_fleet(100.0)).records,
        ran(record, split_fleet(1.0)).records,
    )
    assert (fast.prefilled_by, fast.group) == ("tp0", "tp1")
    kv_bytes = H100.shape.kv_token_bytes * 8000
    assert slow.first_s - fast.first_s == pytest.approx(kv_bytes / 1e9 - kv_bytes / 1e11, rel=1e-3)  # type: ignore[operator]


def test_no_first_token_is_predicted_over_a_link_whose_speed_is_being_tested() -> None:
    records = ran(
        [TraceRequest(0.0, 8000, 5) for _ in range(3)], split_fleet(0.5), "priced"
    ).records
    assert [record.predicted_ttft_s is None for record in records] == [False, True, True]


def test_halves_go_to_groups_whose_kv_can_hold_them_and_what_no_pair_can_hold_is_refused() -> None:
    large, small = (
        msgspec.structs.replace(H100, role=Role.PREFILL),
        msgspec.structs.replace(H100, kv_tokens=8192),
    )
    decodes = [msgspec.structs.replace(kind, role=Role.DECODE) for kind in (small, H100)]
    long = [TraceRequest(number * 0.1, 50_000, 10) for number in range(4)]
    run = ran(long, FleetSpec("unequal", (large, *decodes)))
    assert {(record.end, record.prefilled_by, record.group) for record in run.records} == {
        (RequestEnd.SERVED, "tp0", "tp2")
    }
    run = ran(long, FleetSpec("small", (large, decodes[0])))
    assert {(record.end, record.reason) for record in run.records} == {
        (RequestEnd.SHED, "too_long")
    }


def test_groups_that_do_halves_for_each_other_prefill_no_more_than_they_can_hold() -> None:
    small = msgspec.structs.replace(H100, kv_tokens=8192)
    long = [TraceRequest(number * 0.1, 50_000, 10) for number in range(4)]
    run = ran(long, FleetSpec("both", (small, H100), pairs=True))
    assert {(record.end, record.prefilled_by, record.group) for record in run.records} == {
        (RequestEnd.SERVED, "", "tp1")
    }


def test_groups_that_decode_for_each_other_do_not_wait_for_each_others_memory() -> None:
    small = msgspec.structs.replace(H100, kv_tokens=60_000, count=4)
    burst = [TraceRequest(number * 0.01, 10_000, 20) for number in range(60)]
    run = ran(burst, FleetSpec("both", (small,), pairs=True), horizon_s=600.0)
    assert {record.end for record in run.records} == {RequestEnd.SERVED}
    assert any(record.prefilled_by for record in run.records)


def test_a_link_carries_one_prompt_after_another() -> None:
    run = ran([TraceRequest(0.0, 8000, 5) for _ in range(3)], split_fleet(0.5))
    firsts = sorted(record.first_s for record in run.records)  # type: ignore[type-var]
    each_s = H100.shape.kv_token_bytes * 8000 / 0.5e9
    assert firsts[1] - firsts[0] == pytest.approx(each_s, rel=0.05)  # type: ignore[operator]
    assert firsts[2] - firsts[1] == pytest.approx(each_s, rel=0.05)  # type: ignore[operator]


def test_a_decoder_whose_prefiller_died_computes_the_prompt_itself() -> None:
    quick = ran([TraceRequest(0.0, 8000, 5)], split_fleet(0.5)).records[0]
    dying = ran(
        [TraceRequest(0.0, 8000, 5)], split_fleet(0.5), faults=(GroupFault(2.0, 0),)
    ).records[0]
    assert dying.end is RequestEnd.SERVED
    assert dying.ttft_s > quick.ttft_s  # type: ignore[operator]


def test_a_closed_loop_sends_after_the_answer_and_the_think_time() -> None:
    turns = [
        TraceRequest(0.5, 600, 20, session="s"),
        TraceRequest(0.0, 700, 20, session="s", think_s=2.0),
    ]
    first, second = ran(turns).records
    assert first.arrived_s == 0.5
    assert second.arrived_s == pytest.approx(first.done_s + 2.0)  # type: ignore[operator]


def test_what_is_not_over_at_the_horizon_is_cut() -> None:
    run = ran(some(100, 0.2, output=200), horizon_s=10.0)
    assert {record.end for record in run.records} == {RequestEnd.SERVED, RequestEnd.CUT}
    assert max(record.arrived_s for record in run.records) <= 10.0
