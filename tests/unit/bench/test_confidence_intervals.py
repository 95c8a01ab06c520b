"""Tests of the confidence intervals of medians, and of the lines, that benchmarks report."""

from __future__ import annotations

from random import Random

import pytest

from bench.confidence_intervals import fitted_line, median_interval


def test_the_interval_of_24_values_leaves_six_values_outside_on_either_side() -> None:
    low, middle, high = median_interval([float(value) for value in range(24, 0, -1)])
    # A table of the sign test gives ranks 7 and 18.
    assert (low, middle, high) == (7.0, 12.5, 18.0)


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 3.0, 2.0, 4.0]])
def test_too_few_values_give_the_whole_range(values: list[float]) -> None:
    low, _, high = median_interval(values)
    assert (low, high) == (min(values), max(values))


def test_about_95_percent_of_intervals_contain_the_true_median() -> None:
    rng = Random(5)
    contained = 0
    for _ in range(2_000):
        low, _, high = median_interval([rng.lognormvariate(0.0, 1.0) for _ in range(24)])
        contained += low <= 1.0 <= high
    assert (
        0.95 <= contained / 2_000 <= 0.99
    )  # order statistics are conservative: 97.7 % for 24 values


def test_a_line_through_points_of_a_line_has_no_deviation() -> None:
    slope, intercept, deviation = fitted_line({2: 7.0, 5: 13.0, 9: 21.0})
    assert (slope, intercept) == (pytest.approx(2.0), pytest.approx(3.0))
    assert deviation == pytest.approx(0.0, abs=1e-12)


def test_the_deviation_from_a_line_is_relative_to_the_point() -> None:
    # The line with the least squares is y = 1: the points 0.9, 1.2 and 0.9 are off by 1/9 and 1/6.
    slope, intercept, deviation = fitted_line({1: 0.9, 2: 1.2, 3: 0.9})
    assert (slope, intercept) == (pytest.approx(0.0), pytest.approx(1.0))
    assert deviation == pytest.approx(0.2 / 1.2)
