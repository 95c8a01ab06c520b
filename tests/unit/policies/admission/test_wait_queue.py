"""Tests of special cases of the queue of waiting requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from policies.admission.admission_policy import (
    ADMIT,
    Admit,
    Shed,
    Verdict,
    Wait,
    WaitQueueLimits,
    WaitQueueView,
)
from policies.admission.cap_admission import CapAdmission
from policies.admission.fairness import FairShares
from policies.admission.wait_queue import LOOK_AGAIN_S, WaitQueue
from policies.routing_types import Candidate, RoutingQuery
from tests.unit.policies.builders import ask, candidate


def question(
    number: int, tenant: str = "a", now: float = 0.0, cached: Sequence[int] = ()
) -> RoutingQuery:
    request = ask(cached=cached, now=now)
    return replace(request, request=replace(request.request, id=f"r{number}", tenant=tenant))


def room(*caps: int, size: int = 8) -> tuple[WaitQueue[int], list[Candidate]]:
    candidates = [candidate(slot, cap) for slot, cap in enumerate(caps)]
    waiting_room: WaitQueue[int] = WaitQueue(
        CapAdmission(), WaitQueueLimits(size=size), FairShares({"a": 1.0, "b": 1.0})
    )
    waiting_room.refresh(candidates)
    return waiting_room, candidates


class Reserving(CapAdmission):
    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        return Wait(30.0, is_reserved=True)


def test_deciding_without_queueing_takes_no_place_in_the_queue() -> None:
    waiting_room, candidates = room(1, size=2)
    assert isinstance(waiting_room.arrive(question(0), candidates, 0), Admit)
    assert all(isinstance(waiting_room.arrive(question(n), candidates, n), Wait) for n in (1, 2))
    assert isinstance(waiting_room.decide_without_queueing(question(3, "b"), candidates), Wait)
    assert (waiting_room.waiting, waiting_room.in_flight, waiting_room.take_verdicts(0.1)) == (
        2,
        1,
        [],
    )


def test_the_rate_of_a_full_pool_is_scaled_from_the_places_that_were_taken() -> None:
    waiting_room, candidates = room(40)
    assert waiting_room.full_rate(0.0) is None
    for second in range(600):  # ten requests run at a time, and one arrives each second
        while waiting_room.in_flight < 10:
            waiting_room.arrive(question(second, now=second), candidates, second)
        waiting_room.free_place(float(second))
        waiting_room.in_flight += 1
        for tenth in range(10):
            waiting_room.tick(second + tenth / 10)
    assert waiting_room.full_rate(600.0) == pytest.approx(4.0, rel=0.1)


def test_the_rate_of_a_full_pool_is_the_one_measured_while_requests_wait() -> None:
    waiting_room, candidates = room(4)
    for second in range(60):  # all four places are taken, and two requests arrive each second
        for number in range(8):
            waiting_room.arrive(question(number, now=second), candidates, 10 * second + number)
        for half in (0.0, 0.5):
            waiting_room.free_place(second + half)
            waiting_room.take_verdicts(second + half)
            waiting_room.tick(second + half)
    assert waiting_room.full_rate(60.0) == pytest.approx(2.0, rel=0.1)


def test_a_returning_client_enters_before_those_that_wait() -> None:
    waiting_room, candidates = room(1)
    waiting_room.arrive(question(0), candidates, 0)
    waiting_room.arrive(question(1), candidates, 1)
    waiting_room.admission = Reserving()
    waiting_room.arrive(question(2), candidates, 2)
    waiting_room.admission = CapAdmission()
    waiting_room.free_place(1.0)
    assert waiting_room.take_verdicts(1.0) == [(2, ADMIT)]


def test_a_tenant_is_not_charged_for_an_admitted_request_without_an_endpoint() -> None:
    waiting_room, candidates = room(1)
    waiting_room.arrive(question(0), candidates, 0)
    waiting_room.arrive(question(1, "a"), candidates, 1)
    waiting_room.free_place(1.0)
    assert waiting_room.take_verdicts(1.0) == [(1, ADMIT)]
    waiting_room.on_not_routed(question(1, "a").request)
    waiting_room.on_not_routed(question(1, "a").request)
    waiting_room.arrive(question(2, "b"), candidates, 2)
    waiting_room.arrive(question(3, "a"), candidates, 3)
    assert not waiting_room.is_next("b")
    waiting_room.free_place(2.0)
    waiting_room.cancel(2)
    waiting_room.arrive(question(4, "b"), candidates, 4)
    assert waiting_room.take_verdicts(2.0) == [(3, ADMIT)]


def test_an_unused_permit_does_not_change_the_drain_rate() -> None:
    waiting_room, candidates = room(2)
    waiting_room.arrive(question(0), candidates, 0)
    for _ in range(5):
        assert isinstance(waiting_room.decide_without_queueing(question(1), candidates), Admit)
        waiting_room.undo_admit()
    assert (waiting_room.in_flight, waiting_room.drain_rate.per_s(1.0)) == (1, None)


class Stumbling(CapAdmission):
    __slots__ = ("stumbled",)

    def decide(
        self, ask: RoutingQuery, candidates: Sequence[Candidate], room: WaitQueueView
    ) -> Verdict:
        if not hasattr(self, "stumbled"):
            self.stumbled = True
            raise ZeroDivisionError
        return super().decide(ask, candidates, room)


def test_an_exception_in_the_admission_resets_the_new_arrival_flag() -> None:
    waiting_room, candidates = room(1)
    waiting_room.admission = Stumbling()
    with pytest.raises(ZeroDivisionError):
        waiting_room.arrive(question(0), candidates, 0)
    assert (waiting_room.is_new_arrival, waiting_room.in_flight) == (False, 0)


class Warm(CapAdmission):
    __slots__ = ()

    def decide(
        self, ask: RoutingQuery, candidates: Sequence[Candidate], room: WaitQueueView
    ) -> Verdict:
        return ADMIT if max(ask.cached_by_slot, default=0) else Wait(30.0)


def test_a_waiting_request_is_decided_by_the_present_cache() -> None:
    waiting_room, candidates = room(1)
    waiting_room.admission = Warm()
    permits, looks = [0], 0

    def again(now: float) -> RoutingQuery:
        nonlocal looks
        looks += 1
        return question(1, now=now, cached=tuple(permits))

    assert isinstance(waiting_room.arrive(question(1, cached=(0,)), candidates, 1, again), Wait)
    assert waiting_room.take_verdicts(1.0) == []
    permits[0] = 500
    assert waiting_room.take_verdicts(1.0 + 0.5 * LOOK_AGAIN_S) == []
    assert looks == 1
    assert waiting_room.take_verdicts(1.0 + LOOK_AGAIN_S) == [(1, ADMIT)]


def test_a_waiting_request_is_decided_by_the_present_endpoints() -> None:
    class OnlyNew(CapAdmission):
        __slots__ = ()

        def decide(
            self, ask: RoutingQuery, candidates: Sequence[Candidate], room: WaitQueueView
        ) -> Verdict:
            if not room.is_new_arrival and not any(
                candidate.load.slot == 7 for candidate in candidates
            ):
                return Shed("test", None)
            return super().decide(ask, candidates, room)

    waiting_room, candidates = room(1)
    waiting_room.admission = OnlyNew()
    waiting_room.arrive(question(0), waiting_room._candidates, 0)
    waiting_room.arrive(question(1), waiting_room._candidates, 1)
    waiting_room.refresh([candidate(7, 2)], [candidate.load for candidate in candidates])
    assert waiting_room.take_verdicts(0.5) == [(1, ADMIT)]
