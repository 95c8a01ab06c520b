"""The area under the ROC curve and its interval, by which tenants' isolation is judged."""

from __future__ import annotations

from random import Random

import pytest

from bench.load.tenant_isolation import Area, area


def test_an_area_counts_pairs_in_order_and_ties_by_half() -> None:
    assert area([3.0, 4.0], [1.0, 2.0]).auc == 1.0
    assert area([1.0, 2.0], [3.0, 4.0]).auc == 0.0
    assert area([1.0, 3.0], [2.0, 3.0]).auc == (0 + 0 + 1 + 0.5) / 4
    assert area([0.0] * 9, [0.0] * 9) == Area(0.5, 0.5, 0.5)


def test_an_interval_holds_the_true_area_nineteen_times_in_twenty() -> None:
    rng, within = Random(5), 0
    for _ in range(400):
        result = area([rng.gauss(1, 1) for _ in range(60)], [rng.gauss(0, 1) for _ in range(60)])
        within += result.low <= 0.7602 <= result.high  # of two normals one deviation apart
    assert within / 400 == pytest.approx(0.95, abs=0.035)


def test_what_tells_is_found_and_what_tells_nothing_is_not() -> None:
    rng = Random(6)
    sides = [[rng.gauss(mean, 1) for _ in range(1000)] for mean in (0.3, 0.0, 0.0)]
    assert not area(sides[0], sides[1]).tells_nothing
    assert area(sides[1], sides[2]).tells_nothing
