"""Admission: who enters, who waits, and how honest a Retry-After is."""

from __future__ import annotations

import pytest

from policies.admission import Admit, DrainRate, Shed, Wait, WaitingRoom, admit, capacity, timed_out
from tests.unit.policies.builders import candidate

ROOM = WaitingRoom(size=3, timeout_s=10.0)


def draining(per_s: float, seconds: float = 60.0) -> DrainRate:
    drain = DrainRate()
    for number in range(int(seconds * per_s) + 1):
        drain.completed(number / per_s)
    return drain


def test_capacity_is_the_sum_of_the_available_endpoints_caps() -> None:
    assert capacity([candidate(0, cap=24), candidate(1, cap=8), candidate(2, cap=24, available=False)]) == 32


def test_there_is_room_until_the_cap() -> None:
    assert admit(23, 24, 0, ROOM, DrainRate(), 0.0) == Admit()
    assert admit(24, 24, 0, ROOM, DrainRate(), 0.0) == Wait(10.0)


def test_nobody_overtakes_those_who_wait() -> None:
    assert admit(20, 24, 1, ROOM, DrainRate(), 0.0) == Wait(10.0)


def test_a_full_waiting_room_sheds_without_a_guess_before_anything_was_measured() -> None:
    assert admit(24, 24, 3, ROOM, DrainRate(), 0.0) == Shed("waiting_room_full", None)


def test_a_full_waiting_room_says_when_to_come_back() -> None:
    verdict = admit(24, 24, 3, ROOM, draining(2.0), 60.0)
    assert isinstance(verdict, Shed)
    assert verdict.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_one_who_would_only_wait_to_time_out_is_refused_at_once() -> None:
    slow = draining(0.1)
    verdict = admit(24, 24, 1, ROOM, slow, 60.0)
    assert isinstance(verdict, Shed)
    assert verdict.reason == "too_slow"
    assert verdict.retry_after_s is not None
    assert verdict.retry_after_s > ROOM.timeout_s


def test_without_any_endpoint_nobody_waits() -> None:
    assert admit(0, 0, 0, ROOM, DrainRate(), 0.0) == Shed("no_capacity", None)


def test_one_who_waited_its_time_is_told_how_long_the_rest_needs() -> None:
    verdict = timed_out(4, draining(1.0), 60.0)
    assert verdict.reason == "waited_too_long"
    assert verdict.retry_after_s == pytest.approx(5.0, rel=0.1)


def test_a_drain_rate_is_unbiased_from_the_first_seconds() -> None:
    drain = DrainRate(tau_s=10.0)
    assert drain.per_s(0.0) is None
    drain.completed(0.0)
    assert drain.per_s(0.0) is None
    for number in range(1, 41):
        drain.completed(number / 20)
    assert drain.per_s(2.0) == pytest.approx(20.0, rel=0.1)


def test_a_drain_rate_follows_a_change_and_forgets_a_burst() -> None:
    drain = draining(10.0)
    for number in range(1, 61):
        drain.completed(60.0 + number)
    assert drain.per_s(120.0) == pytest.approx(1.0, rel=0.15)
    assert drain.per_s(500.0) is None
    assert drain.seconds_for(3, 500.0) is None


def test_a_time_constant_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        DrainRate(0.0)
