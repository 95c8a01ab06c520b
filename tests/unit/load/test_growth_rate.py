"""Tests of estimating how fast noisy samples grow; steps and peaks have little effect."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from bench.load.growth_rate import BIN_S, Point, lows, slope

SECONDS = 600


def samples(value: Callable[[int], float]) -> list[Point]:
    return [(float(second), value(second)) for second in range(SECONDS)]


@pytest.mark.parametrize("per_s", [-3.0, 0.0, 20.0])
def test_the_slope_of_noisy_samples_lies_in_its_interval(per_s: float) -> None:
    rng = Random(2)
    result = slope(samples(lambda second: 1e6 + per_s * second + rng.expovariate(1 / 500)))
    assert result.per_s == pytest.approx(per_s, abs=0.5)
    assert result.low <= per_s <= result.high
    assert result.high - result.low < 2.0


def test_peaks_are_not_growth() -> None:
    assert slope(samples(lambda second: 100.0 + (second if second % 7 else 0))).per_s == 0.0


def test_one_early_step_is_not_growth() -> None:
    result = slope(samples(lambda second: 100.0 if second < 60 else 200.0))
    assert result.per_s == 0.0
    assert result.high >= 0.0


def test_a_bin_keeps_its_lowest_sample() -> None:
    assert lows([(0.0, 5.0), (1.0, 3.0), (2.0, 4.0), (BIN_S, 9.0)]) == [(1.0, 3.0), (BIN_S, 9.0)]


def test_too_few_samples_have_no_slope() -> None:
    with pytest.raises(ValueError, match="20 s"):
        slope([(0.0, 1.0), (1.0, 2.0)])
