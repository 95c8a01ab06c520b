"""Tests of whether batches are expected to end within their completion windows."""

from __future__ import annotations

import logging

import pytest

from gateway.batch.completion_window import (
    LOG_EVERY_S,
    SUPPLY_TAU_S,
    PoolSchedule,
    Schedule,
    ScheduleLog,
)
from gateway.batch.file_and_batch_objects import BatchRecord, BatchState
from policies.admission.batch_reserve import WindowDemand

# a batch that needs three places to end in time
TIGHT = WindowDemand("batch_1", 100.0, 280.0, 10.0)
LOOSE = WindowDemand("batch_1", 1000.0, 280.0, 10.0)


def test_the_places_of_the_last_half_minute_decide_whether_a_batch_is_behind() -> None:
    schedule, now = PoolSchedule(), 0.0
    while now < 5.0:  # the free places are enough from the start
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
            "batch batch_1 runs on reserved places, so that it ends in its window: its remaining "
            "requests take about 280 s one by one, and 100 s are left",
        ),
        (
            "WARNING",
            "batch batch_1 will probably not end in its completion window: its remaining requests "
            "take about 280 s one by one, and 100 s are left",
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
