"""Tests of the load at which `make planned` compares simulations with live runs."""

from __future__ import annotations

import pytest

from bench.load.planned_figures import CLOSE_ENOUGH, MOST_LOADS, TARGET, load_near_target


@pytest.mark.parametrize("knee", [0.5, 0.9, 1.0, 1.1, 1.7])
def test_the_load_is_near_the_target_wherever_the_knee_is(knee: float) -> None:
    def attainment(load: float) -> float:
        return min(1.0, max(0.0, 1 - 6 * (load / knee - 1)))

    assert attainment(load_near_target(attainment)) == pytest.approx(TARGET, abs=CLOSE_ENOUGH)


def test_a_planned_load_that_is_near_the_target_stays() -> None:
    assert load_near_target(lambda _: TARGET + CLOSE_ENOUGH / 2) == 1.0


def test_the_closest_load_is_returned_if_none_is_near_the_target() -> None:
    tried = []

    def attainment(load: float) -> float:
        tried.append(load)
        return 0.95 if load < 1.15 else 0.2

    load = load_near_target(attainment)
    assert len(tried) == MOST_LOADS
    assert attainment(load) == 0.95
