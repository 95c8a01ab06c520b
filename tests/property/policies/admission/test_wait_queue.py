"""Property tests of the queue of waiting requests, after any arrivals, departures and times."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.admission.admission_policy import (
    Admit,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
    WaitQueueLimits,
)
from policies.admission.cap_admission import CapAdmission
from policies.admission.fairness import FairShares, TenantCounters
from policies.admission.wait_queue import WaitQueue
from policies.routing_types import Request, RoutingQuery, Slo
from tests.unit.policies.builders import candidate

LIMITS = WaitQueueLimits(size=5, timeout_s=8.0, starvation_s=4.0)
events = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "leave", "cancel", "wait", "flap"]),
        st.integers(0, 5),
        st.floats(0.0, 3.0),
    ),
    max_size=80,
)


def question(number: int, tenant: str, now: float, **fields: object) -> RoutingQuery:
    request = Request(f"r{number}", "model", tenant, 1000, 100, arrived_s=now, **fields)  # type: ignore[arg-type]
    return RoutingQuery(request, now, Random(0))


class History:
    def __init__(self, caps: tuple[int, ...]) -> None:
        self.candidates = [candidate(slot, cap) for slot, cap in enumerate(caps)]
        self.room: WaitQueue[int] = WaitQueue(CapAdmission(), LIMITS, FairShares({"b": 2.0}))
        self.room.refresh(self.candidates)
        self.now = 0.0
        self.asked: dict[int, RoutingQuery] = {}
        self.waits: dict[int, float] = {}
        self.inside: dict[int, None] = {}
        self.refused: set[int] = set()

    def arrive(self, number: int, tenant: str, deadline_s: float | None, priority: int) -> None:
        ask = self.asked[number] = question(
            number, tenant, self.now, deadline_s=deadline_s, priority=priority
        )
        self.heard(number, self.room.arrive(ask, self.candidates, number))
        self.settle()

    def heard(self, number: int, verdict: Verdict) -> None:
        if isinstance(verdict, Wait):
            assert number not in self.waits
            self.waits[number] = self.now + verdict.timeout_s
            return
        self.waits.pop(number, None)
        if isinstance(verdict, Admit):
            self.inside[number] = None
        else:
            assert verdict.detail
            assert verdict.retry_after_s is None or verdict.retry_after_s > 0
            self.refused.add(number)

    def settle(self) -> None:
        for number, verdict in self.room.take_verdicts(self.now):
            assert number in self.waits
            self.heard(number, verdict)

    def leave(self) -> None:
        number = next(iter(self.inside))
        del self.inside[number]
        self.room.release(self.asked[number].request, RequestOutcome(self.now, output_tokens=90))
        self.settle()

    def check(self) -> None:
        room = self.room
        assert room.in_flight == len(self.inside)
        assert room.waiting == len(self.waits) <= LIMITS.size
        assert all(due > self.now for due in self.waits.values()), "somebody waits past its time"
        if self.waits:
            due = room.next_due()
            assert due is not None
            assert abs(due - min(self.waits.values())) < 1e-6
            assert room.busy_permits >= room.capacity, "somebody waits beside a free place"


@settings(max_examples=150, deadline=None)
@given(events)
def test_every_waiting_request_gets_a_verdict_in_time(
    history: list[tuple[str, int, float]],
) -> None:
    result = History((1, 2))
    for number, (what, which, seconds) in enumerate(history):
        result.now += seconds / 4
        result.settle()
        if what == "arrive":
            result.arrive(
                number, "ab"[which % 2], result.now + seconds if which > 3 else None, which % 3
            )
        elif what == "leave" and result.inside:
            result.leave()
        elif what == "cancel" and result.waits:
            number = sorted(result.waits)[which % len(result.waits)]
            assert result.room.cancel(number)
            assert not result.room.cancel(number)
            del result.waits[number]
        elif what == "wait":
            result.now += seconds * 2
        elif what == "flap":
            result.candidates[1].load.is_available = not result.candidates[1].load.is_available
            result.room.refresh(result.candidates)
        result.settle()
        result.check()
    while result.waits or result.inside:
        result.now += 1.0
        result.settle()
        if result.inside:
            result.leave()
        result.check()
    room = result.room
    assert len(room._due) + len(room._fifo) + len(room._ranks) <= 64 + 8  # type: ignore[operator]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(0.5, 9.0)), min_size=2, max_size=12),
    st.integers(0, 20),
)
def test_within_a_tenant_priority_goes_first_and_then_the_least_slack(
    people: list[tuple[int, float]], unused: int
) -> None:
    room: WaitQueue[int] = WaitQueue(CapAdmission(), WaitQueueLimits(size=50))
    one = [candidate(0, 1)]
    room.refresh(one)
    room.arrive(question(99, "t", 0.0), one, 99)
    for number, (priority, ttft_s) in enumerate(people):
        room.arrive(
            question(number, "t", 0.0, priority=priority, slo=Slo(ttft_s=ttft_s)), one, number
        )
    order = []
    last = 99
    while room.waiting:
        room.release(question(last, "t", 0.0).request, RequestOutcome(0.0, output_tokens=100))
        [(last, verdict)] = room.take_verdicts(0.0)
        assert isinstance(verdict, Admit)
        order.append(last)
    assert order == sorted(
        order, key=lambda number: (-people[number][0], people[number][1], number)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=40, max_size=120), st.sampled_from([0.5, 1.0, 3.0]))
def test_two_always_waiting_tenants_get_tokens_by_weight(sizes: list[int], weight: float) -> None:
    # By start-time fair queueing, the normalised difference never exceeds one request of each.
    room: WaitQueue[int] = WaitQueue(
        CapAdmission(),
        WaitQueueLimits(size=10, timeout_s=1e9, starvation_s=1e9),
        FairShares({"b": weight}),
    )
    one = [candidate(0, 1)]
    room.refresh(one)
    rng = Random(len(sizes))
    asks: dict[int, RoutingQuery] = {}
    served = {"a": 0.0, "b": 0.0}

    def arrive(number: int, tenant: str) -> Verdict:
        ask = question(number, tenant, 0.0)
        size = sizes[rng.randrange(len(sizes))]
        asks[number] = replace(
            ask, request=replace(ask.request, prompt_tokens=size, output_tokens=0)
        )
        return room.arrive(asks[number], one, number)

    assert isinstance(arrive(0, "a"), Admit)
    for number, tenant in enumerate("aabb", 1):
        arrive(number, tenant)
    last = 0
    for number in range(5, 5 + len(sizes)):
        room.release(asks[last].request, RequestOutcome(0.0))
        [(last, _)] = room.take_verdicts(0.0)
        request = asks[last].request
        served[request.tenant] += request.prompt_tokens
        assert abs(served["a"] - served["b"] / weight) <= 2000 + 2000 / weight
        arrive(number, request.tenant)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(5, 30))
def test_no_waiting_request_is_overtaken_for_ever(before: int, crowd: int) -> None:
    room: WaitQueue[int] = WaitQueue(
        CapAdmission(), WaitQueueLimits(size=200, timeout_s=1e9, starvation_s=10.0)
    )
    one = [candidate(0, 1)]
    room.refresh(one)
    room.arrive(question(0, "cheap", 0.0), one, 0)
    room._counters.stop_forgiving()
    room._counters.charge("dear", 1e12)
    for number in range(1, before + 1):
        room.arrive(question(number, "dear", 0.0), one, number)
    now, last, releases = 0.0, 0, 0
    number = 1000
    for _ in range(crowd):
        number += 1
        room.arrive(question(number, "cheap", now), one, number)
    while any(ticket <= before for ticket in room._tickets):
        now += 1.0
        number += 1
        room.arrive(question(number, "cheap", now), one, number)
        room.release(question(last, "cheap", now).request, RequestOutcome(now, output_tokens=100))
        [(last, _)] = room.take_verdicts(now)
        releases += now > 10.0
        assert releases <= 4 * before + 4


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.floats(0.1, 1e6), st.floats(0, 30)), max_size=60
    )
)
def test_idleness_saves_nothing_up_and_memory_is_bounded(
    uses: list[tuple[str, float, float]],
) -> None:
    counters, now = TenantCounters(FairShares(remembered=4)), 0.0
    floor = 0.0
    for tenant, tokens, pause_s in uses:
        counters.stop_forgiving()
        before = counters.counter_of(tenant)
        assert before >= floor
        counters.advance_to(before)
        assert counters.charge(tenant, tokens) >= before
        assert counters.counter_of("newcomer") == counters.floor >= floor
        floor = counters.floor
        assert len(counters) <= 4
        counters.forgive(now)
        now += pause_s
        counters.forgive(now)
    counters.forgive(now)
    counters.forgive(now + 1e4)
    assert not len(counters)


def test_the_largest_crowd_makes_room_for_another_tenant_when_the_room_is_full() -> None:
    room: WaitQueue[int] = WaitQueue(CapAdmission(), WaitQueueLimits(size=4))
    one = [candidate(0, 1)]
    room.refresh(one)
    room.arrive(question(0, "loud", 0.0), one, 0)
    for number in range(1, 5):
        assert isinstance(room.arrive(question(number, "loud", float(number)), one, number), Wait)
    assert isinstance(room.arrive(question(5, "quiet", 5.0), one, 5), Wait)
    [(ticket, verdict)] = room.take_verdicts(5.0)
    assert ticket == 4
    assert isinstance(verdict, Shed)
    assert verdict.reason == "waiting_room_full"
    assert isinstance(room.arrive(question(6, "loud", 5.0), one, 6), Shed)
    assert room.waiting == 4
