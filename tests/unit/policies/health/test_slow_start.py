"""Tests of slow start: an endpoint that returns gets more and more requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.endpoint_load import NO_SOFT_CAP
from policies.filters import below_cap
from policies.health.slow_start import soft_cap
from tests.unit.policies.builders import ask, candidate

CAP = 24


@given(st.integers(1, 4096), st.floats(0, 100), st.floats(0, 100), st.floats(0.001, 60))
def test_the_ceiling_only_grows_and_never_is_below_one_or_above_the_cap_before_it_is_gone(
    cap: int, one_s: float, other_s: float, ramp_s: float
) -> None:
    early, late = (soft_cap(cap, now_s, ramp_s) for now_s in sorted((one_s, other_s)))
    assert 1 <= early <= late
    assert early <= cap or early == NO_SOFT_CAP
    assert soft_cap(cap, ramp_s, ramp_s) == NO_SOFT_CAP


def test_an_endpoint_in_slow_start_is_skipped_at_its_soft_cap_while_others_have_room() -> None:
    warming, other = candidate(0, CAP, in_flight=3, soft_cap=3), candidate(1, CAP, in_flight=20)
    assert below_cap(ask(), [warming, other]) == [other]
    warming.load.in_flight = 2
    assert below_cap(ask(), [warming, other]) == [warming, other]


def test_no_request_waits_or_is_refused_because_of_slow_start() -> None:
    warming, other = candidate(0, CAP, in_flight=3, soft_cap=3), candidate(1, CAP, in_flight=CAP)
    assert below_cap(ask(), [warming, other]) == [warming]
    assert below_cap(ask(), [warming]) == [warming]
    warming.load.in_flight = CAP
    assert below_cap(ask(), [warming, other]) == []
