"""Tests of learning how many requests per second a full pool serves."""

from __future__ import annotations

import pytest

from policies.admission.full_pool_rate import SETTLED_S, FullLoadRate


def overloaded(rate: FullLoadRate, measured: float, begin_s: float, seconds: int) -> None:
    for second in range(seconds):
        rate.learn(begin_s + second, measured)


def test_nothing_is_learnt_while_the_measurement_contains_the_calm_before() -> None:
    rate = FullLoadRate()
    overloaded(rate, 1.0, 0.0, int(SETTLED_S))
    assert rate.per_unit is None


def test_a_long_overload_teaches_the_rate_and_a_change_is_followed() -> None:
    rate = FullLoadRate()
    overloaded(rate, 4.0, 0.0, 40)
    assert rate.per_unit == pytest.approx(4.0)
    overloaded(rate, 2.0, 40.0, 120)
    assert rate.per_unit == pytest.approx(2.0, rel=0.05)


def test_the_beginning_of_the_next_overload_does_not_change_what_was_learnt() -> None:
    rate = FullLoadRate()
    overloaded(rate, 4.0, 0.0, 40)
    overloaded(rate, 0.5, 300.0, int(SETTLED_S))
    assert rate.per_unit == pytest.approx(4.0)


def test_a_silent_measurement_teaches_nothing() -> None:
    rate = FullLoadRate()
    for second in range(60):
        rate.learn(float(second), None)
    assert rate.per_unit is None
