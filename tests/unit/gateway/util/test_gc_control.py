"""The garbage collector runs on a schedule, preferably while few requests are in progress."""

from __future__ import annotations

import gc
import weakref

import pytest

from gateway.util.gc_control import AT_LATEST_S, CALM, EVERY_S, Litter


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.self = self


def test_a_cycle_is_collected_after_an_interval_with_low_load() -> None:
    schedule, cycle = Litter(100.0), weakref.ref(Cycle())
    gc.disable()
    try:
        schedule.sweep(100.0 + EVERY_S - 1, 0)
        assert cycle() is not None
        schedule.sweep(100.0 + EVERY_S, CALM)
        assert cycle() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("in_progress", "every_s"), [(CALM, EVERY_S), (CALM + 1, AT_LATEST_S)])
def test_under_load_collections_are_rare(in_progress: int, every_s: float) -> None:
    collected_at: list[float] = []
    schedule = Litter(0.0, lambda: collected_at.append(now))
    for now in range(1, 3601):
        schedule.sweep(float(now), in_progress)
    assert collected_at == [every_s * number for number in range(1, len(collected_at) + 1)]
    assert len(collected_at) == 3600 // every_s
