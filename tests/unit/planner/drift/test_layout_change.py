"""Tests that other hardware is suggested only if it saves more than the change costs."""

from __future__ import annotations

import pytest

from planner.drift.layout_change import choose
from planner.size.finalist_result import Finalist


def fleet(attainment: float, gpus: int, name: str = "f") -> Finalist:
    return Finalist(name, gpus, 2.5 * gpus, attainment, 0.0, None, None, 0.0)


NOW = fleet(0.90, 8, "now")


@pytest.mark.parametrize(
    ("other", "switch_s", "is_suggested", "reason"),
    [
        (fleet(0.97, 8), 60.0, True, "7.8% more requests in time per dollar"),
        (fleet(0.90, 6), 60.0, True, "33.3% more requests in time per dollar"),
        (fleet(0.94, 8), 60.0, False, "gains 4.4%, and at least 5 % are required"),
        (fleet(0.80, 4), 60.0, False, "every other fleet serves fewer requests in time"),
        (fleet(0.97, 8), 300.0, False, "reloading the engines costs 300 s"),
        (fleet(0.99, 16), 60.0, False, "gains -45.0%"),
    ],
)
def test_a_fleet_must_gain_5_percent_and_more_than_its_switch_costs(
    other: Finalist, switch_s: float, is_suggested: bool, reason: str
) -> None:
    found = choose(NOW, [other], switch_s, 3600.0)
    assert found.is_suggested is is_suggested
    assert reason in found.reason


def test_the_best_of_several_fleets_that_keep_the_promises_is_chosen() -> None:
    fleets = [fleet(0.5, 1, "cheap"), fleet(0.91, 6, "good"), fleet(0.95, 8, "fine")]
    assert choose(NOW, fleets, 10.0, 3600.0).best.fleet == "good"


def test_a_fleet_that_keeps_no_promise_is_left_for_any_that_does() -> None:
    assert choose(fleet(0.0, 8), [fleet(0.6, 8)], 60.0, 3600.0).is_suggested
