"""Tests of concurrency caps: which requests enter or wait, and correct Retry-After times."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from msgspec.structs import replace

from policies.admission.admission_policy import (
    Admit,
    Shed,
    Verdict,
    Wait,
)
from policies.admission.cap_admission import CapAdmission, UncappedAdmission
from policies.admission.drain_rate import DrainRate
from policies.admission.gateway_share import total_capacity
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import RoutingQuery
from tests.unit.policies.builders import View, ask, candidate, draining, shed


def asking(now: float, deadline_s: float | None = None) -> RoutingQuery:
    question = ask(now=now)
    return replace(question, request=replace(question.request, deadline_s=deadline_s))


def admit(busy: int, room_for: int, waiting: int, drain: DrainRate, now: float) -> Verdict:
    return CapAdmission().decide(asking(now), (), View(busy, room_for, waiting, drain))


def test_capacity_is_the_sum_of_the_available_endpoints_caps() -> None:
    assert (
        total_capacity(
            [candidate(0, cap=24), candidate(1, cap=8), candidate(2, cap=24, is_available=False)]
        )
        == 32
    )


def test_there_is_room_until_the_cap() -> None:
    assert admit(23, 24, 0, DrainRate(), 0.0) == Admit()
    assert admit(24, 24, 0, DrainRate(), 0.0) == Wait(10.0)


def test_no_new_request_overtakes_waiting_ones() -> None:
    assert admit(20, 24, 1, DrainRate(), 0.0) == Wait(10.0)


def test_the_head_of_the_line_enters_as_soon_as_there_is_a_place_and_waits_until_then() -> None:
    view = View(24, 24, 3, draining(0.01))
    view.is_new_arrival = False
    assert CapAdmission().decide(asking(60.0), (), view) == Wait(10.0)
    view.busy_permits = 23
    assert CapAdmission().decide(asking(60.0), (), view) == Admit()


def test_a_request_that_would_time_out_is_refused_at_once() -> None:
    verdict = shed(admit(24, 24, 1, draining(0.1), 60.0))
    assert verdict.reason == "too_slow"
    assert verdict.detail.startswith("The wait of 12.6 s would be longer")
    assert verdict.retry_after_s is not None


def refused_by_cap(cap: CapAdmission, view: View, prompts: range, now: float = 60.0) -> list[Shed]:
    # Return the refusals of requests that would wait too long in the queue.
    return [shed(cap.decide(with_prompt(number, now), (), view)) for number in prompts]


def with_prompt(number: int, now: float) -> RoutingQuery:
    keys = Fingerprint(array("Q", [number]), 512, 600)
    return replace(asking(now), fingerprint=keys, rng=Random(number))


def test_returns_under_cap_are_spread_over_the_measured_rate() -> None:
    cap, view = CapAdmission(), View(24, 24, 30, draining(2.0))
    waits = [verdict.retry_after_s for verdict in refused_by_cap(cap, view, range(50))]
    assert None not in waits
    assert waits == sorted(waits, key=lambda wait: wait or 0.0)
    assert waits[-1] == pytest.approx(1.0 + 50 / (0.45 * 2.0), rel=0.1)


def test_a_client_that_returns_to_cap_at_its_time_goes_before_new_ones() -> None:
    cap, view = CapAdmission(), View(24, 24, 30, draining(2.0))
    (first,) = refused_by_cap(cap, view, range(1))
    assert first.retry_after_s is not None
    later = 60.0 + first.retry_after_s
    view.drain_rate = draining(2.0, seconds=later)
    assert cap.decide(with_prompt(0, later), (), view) == Wait(10.0, is_reserved=True)
    assert isinstance(cap.decide(with_prompt(0, later), (), view), Shed)


def test_a_client_that_returns_to_cap_early_gets_the_same_time_again() -> None:
    cap, view = CapAdmission(), View(24, 24, 30, draining(2.0))
    told = refused_by_cap(cap, view, range(20))[-1].retry_after_s
    assert told is not None
    again = shed(cap.decide(with_prompt(19, 61.0), (), view))
    assert again.reason == "early"
    assert again.retry_after_s == pytest.approx(told - 1.0)


def test_cap_sends_clients_away_when_every_time_of_five_minutes_is_taken() -> None:
    cap, view = CapAdmission(), View(24, 24, 30, draining(2.0))
    verdicts = refused_by_cap(cap, view, range(400))
    assert verdicts[200].retry_after_s is not None
    assert [(each.retry_after_s, each.may_return) for each in verdicts[300:]] == [
        (None, False)
    ] * 100


def test_new_requests_leave_a_part_of_the_queue_to_returning_clients() -> None:
    cap, view = CapAdmission(), View(24, 24, 3, draining(2.0))
    assert cap.decide(with_prompt(1, 60.0), (), view) == Wait(10.0)
    cap.retry_after_s(with_prompt(2, 60.0), (), view)
    assert shed(cap.decide(with_prompt(1, 60.0), (), view)).reason == "waiting_room_full"


def test_a_request_past_its_deadline_is_refused_at_once_with_both_times() -> None:
    verdict = shed(
        CapAdmission().decide(asking(60.0, deadline_s=61.5), (), View(24, 24, 2, draining(1.0)))
    )
    assert (verdict.reason, verdict.retry_after_s, verdict.may_return) == ("deadline", None, False)
    assert verdict.detail.startswith(
        "The client gives up in 1.5 s and the first token is expected in 2.9 s."
    )


def test_no_request_waits_without_an_endpoint() -> None:
    assert shed(admit(0, 0, 0, DrainRate(), 0.0)).reason == "no_capacity"


def test_no_admission_admits_everything_while_an_endpoint_is_available() -> None:
    assert UncappedAdmission().decide(asking(0.0), (), View(1000, 24, 0)) == Admit()
    assert shed(UncappedAdmission().decide(asking(0.0), (), View(0, 0, 0))).reason == "no_capacity"
