"""Tests that the garbage collector runs on a schedule, preferably while few requests are in
progress.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from gateway.util.garbage_collection import (
    INTERVAL_S,
    MAX_CALM_REQUESTS,
    MAX_INTERVAL_S,
    MIDDLE_EVERY,
    YOUNG_CONNECTIONS,
    GcSchedule,
)


class Cycle:
    def __init__(self) -> None:
        self.self = self


def test_a_cycle_is_collected_after_an_interval_with_low_load() -> None:
    schedule, cycle = GcSchedule(100.0), weakref.ref(Cycle())
    gc.disable()
    try:
        schedule.collect_if_due(100.0 + INTERVAL_S - 1, 0)
        assert cycle() is not None
        schedule.collect_if_due(100.0 + INTERVAL_S, MAX_CALM_REQUESTS)
        assert cycle() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("in_progress", "every_s"),
    [(MAX_CALM_REQUESTS, INTERVAL_S), (MAX_CALM_REQUESTS + 1, MAX_INTERVAL_S)],
)
def test_under_load_collections_are_rare(in_progress: int, every_s: float) -> None:
    collected_at: list[float] = []
    schedule = GcSchedule(0.0, lambda: collected_at.append(now))
    for now in range(1, 3601):
        schedule.collect_if_due(float(now), in_progress)
    assert collected_at == [every_s * number for number in range(1, len(collected_at) + 1)]
    assert len(collected_at) == 3600 // every_s


def test_young_objects_become_old_within_a_few_calls_however_many_old_ones_are_freed() -> None:
    schedule = GcSchedule(0.0)
    gc.collect()
    gc.disable()
    try:
        kept = [[number] for number in range(1000)]
        assert sum(len(gc.get_objects(generation)) for generation in (0, 1)) > 1000
        for _ in range(MIDDLE_EVERY):
            schedule.collect_young()
        assert sum(len(gc.get_objects(generation)) for generation in (0, 1)) < 100
        assert len(kept) == 1000
    finally:
        gc.enable()


def test_young_objects_are_collected_after_some_new_connections() -> None:
    schedule, cycle = GcSchedule(0.0), weakref.ref(Cycle())
    gc.disable()
    try:
        for _ in range(YOUNG_CONNECTIONS - 1):
            schedule.count_connection()
        assert cycle() is not None
        schedule.count_connection()
        assert cycle() is None
    finally:
        gc.enable()
