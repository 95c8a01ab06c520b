"""Tests of detecting requests that wait too long, because their engine hangs or is slow."""

from __future__ import annotations

import pytest

from policies.endpoint_load import NO_SOFT_CAP, EndpointLoad
from policies.engine.step_time import shape_for
from policies.health.endpoint_speed import Slowness, SpeedRecord, SpeedVerdict
from policies.health.late_request_detection import (
    LEAST_LATE_S,
    SUSPECT_CEILING,
    Expectations,
    choose_doubted,
    is_doubted,
    is_proven,
    raised_ceiling,
    remaining_wait_s,
)
from policies.health.speed_outlier import ReviewedEndpoint, SlowLimits, review
from policies.health.speed_samples import Measure

SHAPE = shape_for("h200", 4)
STEP_S = 0.08


def member(record: SpeedRecord, kind: str = "h200") -> ReviewedEndpoint:
    return ReviewedEndpoint(
        record, kind, SHAPE, record.step_tokens(1500 * record.waiting, SHAPE.budget_tokens, 0)
    )


def speed_record(times: int = 1, seconds: float = STEP_S) -> SpeedRecord:
    # Return the speed record of an endpoint that completed `times` prompts of 1,500 tokens.
    #
    # The last prompt was sent 2 s before time 0.
    record = SpeedRecord()
    for number in range(times):
        record.on_sent(1500, (number - times) * 2.0)
        record.on_first_token(1500, (number - times) * 2.0 + seconds)
    return record


def waiting(record: SpeedRecord, prompts: int = 1) -> SpeedRecord:
    for number in range(prompts):
        record.on_sent(1500, 0.1 * number)
    return record


def test_one_completed_prompt_at_a_peer_is_enough_to_see_a_stall() -> None:
    members = [member(waiting(SpeedRecord())), member(speed_record()), member(SpeedRecord())]
    expectations = Expectations()
    assert expectations.stalled(members, 1.9 * STEP_S) == []
    ((ratio, index),) = expectations.stalled(members, 2.1 * STEP_S)
    assert index == 0
    assert ratio == pytest.approx(2.1)


def test_without_a_completed_prompt_nothing_is_a_stall() -> None:
    members = [member(waiting(SpeedRecord())), member(waiting(SpeedRecord()))]
    assert Expectations().stalled(members, 60.0) == []


def test_prompts_that_came_after_the_step_began_do_not_excuse_it() -> None:
    members = [member(waiting(SpeedRecord(), prompts=5)), member(speed_record())]
    assert [index for _, index in Expectations().stalled(members, 0.45)] == [0]


def test_prompts_that_came_together_are_one_step() -> None:
    record = SpeedRecord()
    for _ in range(4):
        record.on_sent(1500, 0.0)
    assert Expectations().stalled([member(record), member(speed_record())], 2.1 * STEP_S) == []


@pytest.mark.parametrize(("is_decoding", "stalls"), [(True, []), (False, [0])])
def test_an_engine_without_streams_begins_with_the_first_prompt(
    is_decoding: bool, stalls: list[int]
) -> None:
    record = SpeedRecord()
    for number in range(3):
        record.on_sent(1500, 0.01 * number, is_decoding=is_decoding)
    members = [member(record), member(speed_record())]
    assert [index for _, index in Expectations().stalled(members, 2.5 * STEP_S)] == stalls


def test_peers_of_another_kind_prove_nothing() -> None:
    members = [
        member(waiting(SpeedRecord()), "l40s"),
        member(speed_record()),
        member(speed_record()),
    ]
    assert Expectations().stalled(members, 1.0) == []


def test_no_step_is_a_stall_within_the_least_time() -> None:
    members = [member(waiting(SpeedRecord())), member(speed_record(seconds=0.01))]
    assert Expectations().stalled(members, LEAST_LATE_S - 0.01) == []


@pytest.mark.parametrize(("ratio", "doubted"), [(2.5, []), (3.5, [0])])
def test_a_short_stall_is_no_doubt(ratio: float, doubted: list[int]) -> None:
    assert choose_doubted([(ratio, 0)], [False] * 4) == doubted


@pytest.mark.parametrize(
    ("doubted", "chosen"),
    [
        ([False] * 4, [3, 1]),
        ([False, False, True, False], [3]),
        ([False, True, False, False], [3, 1]),
        ([True, True, False, False], [1, 0]),
        ([False] * 2, [1]),
    ],
)
def test_at_least_half_of_a_pool_stays_free_of_doubt(
    doubted: list[bool], chosen: list[int]
) -> None:
    stalled = [(9.0, 3), (8.0, 1), (7.0, 0)] if len(doubted) == 4 else [(8.0, 1), (7.0, 0)]
    assert choose_doubted(stalled, doubted) == chosen


def kept_pace() -> SpeedRecord:
    records = [speed_record(5) for _ in range(3)]
    review([member(record) for record in records], 1.0, SlowLimits())
    return records[0]


def test_an_endpoint_is_proven_by_a_review_and_no_longer_when_it_restarts() -> None:
    record = kept_pace()
    assert is_proven(record)
    record.verdict = SpeedVerdict.SUSPECT
    assert not is_proven(record)
    record.restart()
    assert not is_proven(record)


def test_a_request_at_an_unproven_endpoint_is_worth_a_hedge_sooner() -> None:
    new, proven = SpeedRecord(), kept_pace()
    assert remaining_wait_s(new, STEP_S, 1.9 * STEP_S, 0.0) is None
    assert remaining_wait_s(new, STEP_S, 2.0 * STEP_S, 0.0) == pytest.approx(2.0 * STEP_S)
    left = remaining_wait_s(proven, STEP_S, 2.0 * STEP_S, 0.0)
    assert left is not None
    assert left < 2.0 * STEP_S


def test_requests_behind_a_stalled_prompt_are_late_with_it() -> None:
    left = remaining_wait_s(SpeedRecord(), 5 * STEP_S, 0.12, 2.0)
    assert left == pytest.approx(4.0 * 5 * STEP_S - 0.12)


def test_a_prompt_is_behind_if_the_step_under_way_began_long_before_it() -> None:
    # The step continues in the engine even after the prompt that measured it was cancelled.
    record = SpeedRecord()
    for sent_at in (0.0, 0.01, 0.2):
        record.on_sent(1500, sent_at)
    for _ in range(2):
        assert [record.is_behind(sent_at) for sent_at in (0.01, 0.2)] == [False, True]
        record.on_overtaken(1500, 1500, 0.4, late_s=0.8)
    record.on_first_token(1500, 0.5)
    assert not record.is_behind(0.2)


def expected_left_s(waited_s: float, *, is_doubted: bool, is_behind: bool) -> float | None:
    """Return the predicted seconds until the first token of a request at an endpoint that hangs.

    None if the request is not late. The endpoint has computed 1,500 tokens since time 0. The
    prompts up to and including the request's have 3,000 tokens, which take about two steps.
    """
    doubted = member(waiting(SpeedRecord()))
    expectations = Expectations()
    expectations.stalled([doubted, member(speed_record())], waited_s)
    return expectations.predict_remaining_s(
        doubted, Measure.TTFT, 3000, waited_s, waited_s, is_doubted=is_doubted, is_behind=is_behind
    )


def test_requests_behind_others_at_an_endpoint_in_doubt_are_late_at_once() -> None:
    assert expected_left_s(0.1, is_doubted=False, is_behind=True) is None
    left = expected_left_s(0.1, is_doubted=True, is_behind=True)
    assert left is not None
    assert left > 2.0 * 2.0 * STEP_S


def test_the_next_request_at_an_endpoint_in_doubt_is_late_after_little_more_than_usual() -> None:
    assert expected_left_s(1.1 * 2.0 * STEP_S, is_doubted=True, is_behind=False) is None
    assert expected_left_s(1.5 * 2.0 * STEP_S, is_doubted=True, is_behind=False) is not None


def test_the_ratio_that_a_review_found_counts() -> None:
    record = kept_pace()
    record.slowness = Slowness(Measure.TTFT, 10.0, 0.8, STEP_S)
    assert remaining_wait_s(record, STEP_S, 0.16, 0.0) == pytest.approx(
        10.0 * STEP_S - 0.16 - LEAST_LATE_S
    )


def test_an_endpoint_that_usually_takes_twice_as_long_is_no_stall_at_twice_the_time() -> None:
    record = waiting(speed_record())
    for _ in range(30):
        record.tracks[0].update_usual_ratio(2.0)
    members = [member(record), member(speed_record()), member(speed_record())]
    assert Expectations().stalled(members, 3.0 * STEP_S) == []


def test_overtaken_prompts_are_evidence_once() -> None:
    # The first prompt shows how long the step took. The prompts that waited behind it are no
    # further evidence.
    record = waiting(SpeedRecord(), prompts=3)
    for _ in range(3):
        record.on_overtaken(1500, 1500, 0.4, late_s=0.4, step_s=0.6)
    record.prepare(1.0)
    assert record.waiting == 0
    assert record.tracks[0].recent.total == 1.0
    assert sum(record.tracks[0].recent.seconds) == pytest.approx(0.4)


def late_step_s(record: SpeedRecord, age_s: float) -> float:
    members = [member(record), member(speed_record())]
    expectations = Expectations()
    expectations.stalled(members, age_s)
    return expectations.late_step_s(members[0], age_s)


def test_a_delay_beyond_twice_the_usual_time_is_expected_to_double() -> None:
    assert late_step_s(waiting(SpeedRecord()), 1.9 * STEP_S) == 0.0
    assert late_step_s(waiting(SpeedRecord()), 2.5 * STEP_S) == pytest.approx(5.0 * STEP_S)


def test_a_delay_that_is_usual_at_an_endpoint_does_not_double() -> None:
    record = waiting(speed_record(3, 3.0 * STEP_S))
    assert late_step_s(record, 2.5 * STEP_S) == pytest.approx(3.0 * STEP_S)
    assert late_step_s(record, 6.1 * STEP_S) == pytest.approx(12.2 * STEP_S)


def test_an_overtaken_prompt_behind_others_leaves_the_step_under_way() -> None:
    record = SpeedRecord()
    record.on_sent(1000, 0.0)
    record.on_sent(2000, 0.2)
    record.on_overtaken(2000, 1000, 0.4, late_s=0.4)
    assert (record.waiting, record.since) == (1, 0.0)


def test_an_endpoint_that_answers_by_itself_is_expected_to_take_its_own_time() -> None:
    # With two endpoints, the mean of their times would expect too long a time from the faster one.
    slow, fast = speed_record(3, 0.8), speed_record(3)
    expectations = Expectations()
    members = [member(slow), member(fast)]
    expectations.peer_times_by_kind = review(members, 1.0, SlowLimits())
    assert expectations.first_byte_s(members[1], Measure.TTFT, 1500) == pytest.approx(STEP_S)


def test_after_a_doubt_the_ceiling_grows_step_by_step() -> None:
    load = EndpointLoad(0)
    assert not is_doubted(load)
    load.soft_cap, ceilings = SUSPECT_CEILING, []
    assert is_doubted(load)
    while load.soft_cap != NO_SOFT_CAP:
        load.soft_cap = raised_ceiling(load.soft_cap)
        ceilings.append(load.soft_cap)
    assert ceilings == [2, 4, 8, 16, 32, 64, NO_SOFT_CAP]
