"""Cycles that libraries leave behind are looked for by the clock, while few requests are held up by that."""

from __future__ import annotations

import gc
import weakref

import pytest

from gateway.litter import AT_LATEST_S, CALM, EVERY_S, Litter


class Ring:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.self = self


def test_a_cycle_is_gone_after_a_minute_of_calm_and_stays_until_then() -> None:
    litter, ring = Litter(100.0), weakref.ref(Ring())
    gc.disable()
    try:
        litter.sweep(100.0 + EVERY_S - 1, 0)
        assert ring() is not None
        litter.sweep(100.0 + EVERY_S, CALM)
        assert ring() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("under_way", "every_s"), [(CALM, EVERY_S), (CALM + 1, AT_LATEST_S)])
def test_many_requests_are_held_up_rarely(under_way: int, every_s: float) -> None:
    looked: list[float] = []
    litter = Litter(0.0, lambda: looked.append(now))
    for now in range(1, 3601):
        litter.sweep(float(now), under_way)
    assert looked == [every_s * number for number in range(1, len(looked) + 1)]
    assert len(looked) == 3600 // every_s
