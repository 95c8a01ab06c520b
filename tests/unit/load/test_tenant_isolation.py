"""The area under the ROC curve and its interval, which measure the isolation of tenants."""

from __future__ import annotations

from random import Random

import pytest

from bench.load.tenant_isolation import Area, area


def test_the_area_counts_ordered_pairs_and_half_of_the_ties() -> None:
    assert area([3.0, 4.0], [1.0, 2.0]).auc == 1.0
    assert area([1.0, 2.0], [3.0, 4.0]).auc == 0.0
    assert area([1.0, 3.0], [2.0, 3.0]).auc == (0 + 0 + 1 + 0.5) / 4
    assert area([0.0] * 9, [0.0] * 9) == Area(0.5, 0.5, 0.5)


def test_the_interval_contains_the_true_area_nineteen_times_in_twenty() -> None:
    rng, within = Random(5), 0
    for _ in range(400):
        result = area([rng.gauss(1, 1) for _ in range(60)], [rng.gauss(0, 1) for _ in range(60)])
        within += result.low <= 0.7602 <= result.high  # of two normals one deviation apart
    assert within / 400 == pytest.approx(0.95, abs=0.035)


def test_different_distributions_are_distinguishable_and_equal_ones_are_not() -> None:
    rng = Random(6)
    sides = [[rng.gauss(mean, 1) for _ in range(1000)] for mean in (0.3, 0.0, 0.0)]
    assert not area(sides[0], sides[1]).is_a_guess
    assert area(sides[1], sides[2]).is_a_guess
