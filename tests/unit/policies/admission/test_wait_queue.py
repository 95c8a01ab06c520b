"""Edge cases of the wait queue: requests that do not queue, refunds, and renewed queries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from policies.admission.admission import (
    ADMIT,
    Admit,
    Cap,
    RoomView,
    Shed,
    Verdict,
    Wait,
    WaitingRoom,
)
from policies.admission.fairness import FairShares
from policies.admission.wait_queue import LOOK_AGAIN_S, Room
from policies.model import Ask, Candidate
from tests.unit.policies.builders import ask, candidate


def question(number: int, tenant: str = "a", now: float = 0.0, cached: Sequence[int] = ()) -> Ask:
    asked = ask(cached=cached, now=now)
    return replace(asked, request=replace(asked.request, id=f"r{number}", tenant=tenant))


def room(*caps: int, size: int = 8) -> tuple[Room[int], list[Candidate]]:
    candidates = [candidate(slot, cap) for slot, cap in enumerate(caps)]
    made: Room[int] = Room(Cap(), WaitingRoom(size=size), FairShares({"a": 1.0, "b": 1.0}))
    made.refresh(candidates)
    return made, candidates


def test_deciding_without_queueing_takes_no_place_in_the_queue() -> None:
    made, candidates = room(1, size=2)
    assert isinstance(made.arrive(question(0), candidates, 0), Admit)
    assert all(isinstance(made.arrive(question(n), candidates, n), Wait) for n in (1, 2))
    assert isinstance(made.knock(question(3, "b"), candidates), Wait)
    assert (made.waiting, made.in_flight, made.settle(0.1)) == (2, 1, [])


def test_a_tenant_is_not_charged_for_an_admitted_request_without_an_endpoint() -> None:
    made, candidates = room(1)
    made.arrive(question(0), candidates, 0)
    made.arrive(question(1, "a"), candidates, 1)
    made.gone(1.0)
    assert made.settle(1.0) == [(1, ADMIT)]
    made.unbooked(question(1, "a").request)
    made.unbooked(question(1, "a").request)
    made.arrive(question(2, "b"), candidates, 2)
    made.arrive(question(3, "a"), candidates, 3)
    assert not made.first("b")
    made.gone(2.0)
    made.cancel(2)
    made.arrive(question(4, "b"), candidates, 4)
    assert made.settle(2.0) == [(3, ADMIT)]


def test_an_unused_permit_does_not_change_the_drain_rate() -> None:
    made, candidates = room(2)
    made.arrive(question(0), candidates, 0)
    for _ in range(5):
        assert isinstance(made.knock(question(1), candidates), Admit)
        made.withdraw()
    assert (made.in_flight, made.drain.per_s(1.0)) == (1, None)


class Stumbling(Cap):
    """An admission that raises once."""

    __slots__ = ("stumbled",)

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        if not hasattr(self, "stumbled"):
            self.stumbled = True
            raise ZeroDivisionError
        return super().judge(ask, candidates, room)


def test_an_exception_in_the_admission_resets_the_new_arrival_flag() -> None:
    made, candidates = room(1)
    made.admission = Stumbling()
    with pytest.raises(ZeroDivisionError):
        made.arrive(question(0), candidates, 0)
    assert (made.at_door, made.in_flight) == (False, 0)


class Warm(Cap):
    """Admits only prompts with a cached prefix; others wait."""

    __slots__ = ()

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        return ADMIT if max(ask.cached, default=0) else Wait(30.0)


def test_a_waiting_request_is_decided_by_the_present_cache() -> None:
    made, candidates = room(1)
    made.admission = Warm()
    held, looks = [0], 0

    def again(now: float) -> Ask:
        nonlocal looks
        looks += 1
        return question(1, now=now, cached=tuple(held))

    assert isinstance(made.arrive(question(1, cached=(0,)), candidates, 1, again), Wait)
    assert made.settle(1.0) == []
    held[0] = 500
    assert made.settle(1.0 + 0.5 * LOOK_AGAIN_S) == []
    assert looks == 1
    assert made.settle(1.0 + LOOK_AGAIN_S) == [(1, ADMIT)]


def test_a_waiting_request_is_decided_by_the_present_endpoints() -> None:
    class OnlyNew(Cap):
        __slots__ = ()

        def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
            if not room.at_door and not any(each.load.slot == 7 for each in candidates):
                return Shed("test", None)
            return super().judge(ask, candidates, room)

    made, candidates = room(1)
    made.admission = OnlyNew()
    made.arrive(question(0), made._candidates, 0)
    made.arrive(question(1), made._candidates, 1)
    made.refresh([candidate(7, 2)], [each.load for each in candidates])
    assert made.settle(0.5) == [(1, ADMIT)]
