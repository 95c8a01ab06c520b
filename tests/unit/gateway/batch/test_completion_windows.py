"""Tests of how a batch meets its deadline: expected durations of requests, and its schedule."""

from __future__ import annotations

import logging

import pytest

from gateway.batch.completion_windows import (
    LOG_EVERY_S,
    SUPPLY_TAU_S,
    TICK_S,
    PoolSchedule,
    RequestTimes,
    Schedule,
    ScheduleLog,
)
from gateway.batch.file_and_batch_objects import BatchRecord, BatchState
from policies.admission.batch_reserve import WindowDemand

TIGHT = WindowDemand("batch_1", 100.0, 280.0, 10.0)  # needs three places to end in time at all
LOOSE = WindowDemand("batch_1", 1000.0, 280.0, 10.0)


def test_work_left_is_that_of_all_requests_without_the_part_that_was_done() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    times.add_attempt(2, 4.0, is_kept=True)
    times.add_attempt(3, 9.0, is_kept=False)
    # Five of 15 s; 4 s of the third were done, and 6 s of the fifth.
    assert times.estimate(5, {4: 6.0}, None) == (65.0, 20.0)


def test_an_answer_in_parts_counts_with_all_of_them_and_one_begun_again_with_the_last() -> None:
    times = RequestTimes()
    times.add_attempt(0, 4.0, is_kept=True)
    times.add_attempt(0, 5.0, is_kept=True)
    times.add_result(0, 6.0 - TICK_S)
    times.add_attempt(1, 30.0, is_kept=False)
    times.add_result(1, 5.0 - TICK_S)
    assert times.estimate(10, {}, None) == (100.0, 15.0)


def test_an_answer_beyond_the_mean_is_expected_to_end_soon_but_not_at_once() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_attempt(1, 15.0, is_kept=True)
    assert times.estimate(2, {1: 10.0}, None) == (11.0, 25.0)
    assert times.estimate(1, {1: 10.0}, None) == (1.0, 1.0)


def test_once_all_requests_run_the_longest_is_what_the_youngest_may_still_need() -> None:
    times = RequestTimes()
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    assert times.estimate(2, {2: 14.0, 3: 3.0}, None) == (1.5 + 12.0, 17.0)


@pytest.mark.parametrize(
    ("running", "usual_s", "expected"),
    [
        ({}, None, (0.0, 0.0)),
        ({}, 3.0, (48.0, 12.0)),
        ({0: 15.0}, 3.0, (46.5, 15.0)),
        ({0: 5.0}, None, (15.5, 5.0)),
    ],
)
def test_before_a_request_has_ended_it_is_expected_to_take_longer_than_those_of_the_pool(
    running: dict[int, float], usual_s: float | None, expected: tuple[float, float]
) -> None:
    assert RequestTimes().estimate(4, running, usual_s) == expected


def test_the_next_owner_continues_with_the_mean_and_the_longest_time() -> None:
    times = RequestTimes()
    assert times.measured is None
    times.add_result(0, 10.0 - TICK_S)
    times.add_result(1, 20.0 - TICK_S)
    assert times.measured == (15.0, 20.0)
    assert RequestTimes(times.measured).estimate(4, {}, 99.0) == (60.0, 20.0)


def test_the_places_of_the_last_half_minute_decide_whether_a_batch_is_behind() -> None:
    schedule, now = PoolSchedule(), 0.0
    while now < 5.0:  # free places are enough from the start
        now += 0.02
        schedule.update([TIGHT], 2, 6, now)
        assert schedule.schedule_of("batch_1") is Schedule.HURRIED
    began = now
    while schedule.schedule_of("batch_1") is not Schedule.BEHIND:
        now += 0.02
        schedule.update([TIGHT], 2, 0, now)
    assert 1.0 < now - began < SUPPLY_TAU_S
    schedule.update([LOOSE], 2, 0, now)
    assert schedule.schedule_of("batch_1") is Schedule.ON_TIME
    schedule.update([TIGHT], 2, 0, now)
    schedule.clear()
    assert (schedule.plan.places, schedule.schedule_of("batch_1")) == (0, Schedule.ON_TIME)


def test_each_change_of_the_schedule_is_logged_once_and_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    log = ScheduleLog()
    for now, schedule in (
        (0.0, Schedule.ON_TIME),
        (1.0, Schedule.HURRIED),
        (2.0, Schedule.HURRIED),
        (3.0, Schedule.ON_TIME),
        (4.0, Schedule.HURRIED),
        (LOG_EVERY_S + 2.0, Schedule.BEHIND),
        (2 * LOG_EVERY_S + 3.0, Schedule.ON_TIME),
    ):
        log.update(TIGHT, schedule, now)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            "batch batch_1 runs on reserved places, so that it ends in its window: about 280 s of "
            "work on one place are left, and 100 s of time",
        ),
        (
            "WARNING",
            "batch batch_1 will probably not end in its completion window: about 280 s of work on "
            "one place are left, and 100 s of time",
        ),
        ("INFO", "batch batch_1 is on time again"),
    ]
    log.keep([])
    log.update(TIGHT, Schedule.BEHIND, 3 * LOG_EVERY_S)
    assert len(caplog.records) == 4


def test_clients_see_the_schedule_while_requests_run() -> None:
    record = BatchRecord("batch_1", "", "", "/v1/completions", "file-1", "24h", 0, 1)
    assert record.as_object()["schedule"] is None
    record = record.enter(BatchState.IN_PROGRESS, 1.0, schedule="behind")
    assert record.as_object()["schedule"] == "behind"
    assert record.enter(BatchState.COMPLETED, 2.0).as_object()["schedule"] is None
