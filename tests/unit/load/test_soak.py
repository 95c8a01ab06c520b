"""Tests of how a soak test judges memory: growth that ends is no leak."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from bench.load.growth_rate import Point
from bench.load.soak import MB_PER_HOUR, SoakResult, slopes_of_halves

BASE, NOISE = 90e6, 20_000.0


def result_of(minutes: float, leak_mb_per_hour: float, filling: float = 0.0) -> SoakResult:
    # Return the result of a run whose memory leaks, and grows by `filling` bytes while caches fill.
    rng = Random(1)
    rss: list[Point] = []
    for second in range(int(minutes * 60)):
        grown = leak_mb_per_hour * MB_PER_HOUR * second + filling * (1.0 - exp(-second / 120.0))
        rss.append((float(second), BASE + grown + rng.expovariate(1.0 / NOISE)))
    return SoakResult(minutes, {}, {}, [], {}, {}, *slopes_of_halves(rss), rss)


@pytest.mark.parametrize("filling", [0.0, 1e6])
def test_a_leak_is_missed_whether_or_not_caches_fill(filling: float) -> None:
    result = result_of(20, 2.0, filling)
    assert len(result.misses) == 1
    assert "second half" in result.misses[0]


def test_memory_that_levels_off_meets_the_requirement_although_it_has_grown() -> None:
    result = result_of(20, 0.0, 1e6)
    assert result.first_half.per_s > 2.0 * MB_PER_HOUR
    assert not result.misses
    assert not result.is_growth_unclear


def test_a_run_that_is_too_short_is_neither_missed_nor_clear() -> None:
    result = result_of(2, 0.5)
    assert not result.misses
    assert result.is_growth_unclear
