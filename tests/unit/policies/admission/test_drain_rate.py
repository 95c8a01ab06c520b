"""Tests of the measured rate of completed requests."""

from __future__ import annotations

import pytest

from policies.admission.drain_rate import DrainRate
from tests.unit.policies.builders import draining


def test_a_drain_rate_is_unbiased_from_the_first_seconds() -> None:
    drain = DrainRate(tau_s=10.0)
    assert drain.per_s(0.0) is None
    drain.record(0.0)
    assert drain.per_s(0.0) is None
    for number in range(1, 41):
        drain.record(number / 20)
    assert drain.per_s(2.0) == pytest.approx(20.0, rel=0.1)


def test_a_drain_rate_follows_a_change_and_forgets_a_burst() -> None:
    drain = draining(10.0)
    for number in range(1, 61):
        drain.record(60.0 + number)
    assert drain.per_s(120.0) == pytest.approx(1.0, rel=0.15)
    assert drain.per_s(500.0) is None
    assert drain.seconds_for(3, 500.0) is None


def test_a_time_constant_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        DrainRate(0.0)
