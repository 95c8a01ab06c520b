"""Slow start: a ramp that only grows, and a preference that never refuses anybody."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from policies.filters import below_cap
from policies.model import NO_CEILING, Ask, Candidate, Endpoint, EndpointLoad, Request
from policies.warmup import ceiling

ASK = Ask(Request("r", "m", "", 100, 10), 0.0, Random(0))


def candidate(slot: int, in_flight: int, most: int = NO_CEILING) -> Candidate:
    each = Candidate(Endpoint(f"tp{slot}", "http://x", "main", "m", max_concurrency=24), EndpointLoad(slot))
    each.load.in_flight, each.load.ceiling = in_flight, most
    return each


@given(st.integers(1, 4096), st.floats(0, 100), st.floats(0, 100), st.floats(0.001, 60))
def test_the_ceiling_only_grows_and_never_is_below_one_or_above_the_cap_before_it_is_gone(
    cap: int, one_s: float, other_s: float, ramp_s: float
) -> None:
    early, late = (ceiling(cap, at, ramp_s) for at in sorted((one_s, other_s)))
    assert 1 <= early <= late
    assert early <= cap or early == NO_CEILING
    assert ceiling(cap, ramp_s, ramp_s) == NO_CEILING


def test_one_that_warms_up_is_passed_over_at_its_ceiling_while_others_have_room() -> None:
    warming, other = candidate(0, 3, most=3), candidate(1, 20)
    assert below_cap(ASK, [warming, other]) == [other]
    warming.load.in_flight = 2
    assert below_cap(ASK, [warming, other]) == [warming, other]


def test_nobody_waits_or_is_refused_for_the_sake_of_a_ramp() -> None:
    warming, other = candidate(0, 3, most=3), candidate(1, 24)
    assert below_cap(ASK, [warming, other]) == [warming]
    assert below_cap(ASK, [warming]) == [warming]
    warming.load.in_flight = 24
    assert below_cap(ASK, [warming, other]) == []
