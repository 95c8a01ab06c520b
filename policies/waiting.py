"""The waiting room of one pool: permits, and those who wait for one, in the order in which they may go in.

Pure and sans-IO: tickets are whatever the caller likes (futures in gateway/gate.py, jobs in a replay), time is an
argument, and what is due comes back as a list. Who may enter at all is an Admission's to say (admission.py).

Order: one who has waited past the starvation bound (at most every fourth turn, so that one tenant's crowd cannot take
all of them), then the tenant with the least counter (fairness.py), and within the tenant the highest priority, then
the least slack: the moment at which its prefill must begin to meet its TTFT budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Generic, TypeVar

import msgspec

from policies import admission as verdicts
from policies.admission import Admission, Admit, DrainRate, Outcome, Shed, Verdict, Wait, WaitingRoom
from policies.appraisal import appraise
from policies.fairness import Counters, FairShares, charged_tokens
from policies.load import EndpointLoad
from policies.model import Ask, Candidate, Pick, Request

T = TypeVar("T", bound=Hashable)

STARVED_EVERY = 4
TENANTS_ASKED = 4
CHARGES_REMEMBERED = 4096

LOOK_AGAIN_S = 0.1
"""What is cached of a waiter's prompt is looked up again when it is judged, but not more often."""


class Waiter(Generic[T]):
    """One who waits. `due_s`: the moment from which waiting is pointless; `must_begin_s`: slack in absolute time."""

    __slots__ = (
        *("again", "arrived_s", "ask", "by_deadline", "candidates", "due_s", "gone", "looked_s", "must_begin_s"),
        *("own_s", "ticket", "tokens"),
    )

    def __init__(
        self,
        ask: Ask,
        candidates: Sequence[Candidate],
        ticket: T,
        timeout_s: float,
        again: Callable[[float], Ask] | None,
    ) -> None:
        request, own = ask.request, appraise(ask, candidates)
        self.ask, self.candidates, self.ticket, self.again = ask, candidates, ticket, again
        self.arrived_s = self.looked_s = ask.now
        self.own_s = own.prefill_s
        self.tokens = charged_tokens(request, own.cached_tokens)
        self.due_s = ask.now + timeout_s
        promised = (request.arrived_s or ask.now) + request.slo.ttft_s
        self.by_deadline = request.deadline_s is not None and request.deadline_s - self.own_s < self.due_s
        if request.deadline_s is not None:
            promised = min(promised, request.deadline_s)
            self.due_s = min(self.due_s, request.deadline_s - self.own_s)
        self.must_begin_s = promised - self.own_s
        self.gone = False


class Line(Generic[T]):
    """The waiters of one tenant, most urgent first. `counter` is what the tenant is ranked by."""

    __slots__ = ("counter", "heap", "size")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.heap: list[tuple[int, float, int, Waiter[T]]] = []
        self.size = 0

    def first(self) -> Waiter[T]:
        while self.heap[0][-1].gone:
            heappop(self.heap)
        return self.heap[0][-1]

    def last(self) -> Waiter[T]:
        """The least urgent. O(size)."""
        return max(entry for entry in self.heap if not entry[-1].gone)[-1]


class Room(Generic[T]):
    """Permits and waiters of one pool. Everything that arrives leaves: by a verdict, by `cancel`, or by `leave`.

    in_flight  permits given and not given back
    capacity   places at available endpoints
    at_door    whether the admission is being asked about a newcomer (for RoomView)
    waiting_s  prefill seconds of all who wait
    """

    __slots__ = (
        *("_candidates", "_charged", "_counters", "_degraded", "_due", "_evicted", "_fifo", "_leaving", "_lines"),
        *("_numbers", "_ranks", "_tickets", "_turns", "admission", "at_door", "capacity", "drain", "in_flight"),
        *("limits", "waiting_s"),
    )

    def __init__(
        self, admission: Admission, limits: WaitingRoom | None = None, shares: FairShares | None = None
    ) -> None:
        self.admission = admission
        self.limits = limits or WaitingRoom()
        self.drain = DrainRate()
        self.in_flight = self.capacity = 0
        self.waiting_s = 0.0
        self.at_door = False
        self._candidates: Sequence[Candidate] = ()
        self._leaving: Sequence[EndpointLoad] = ()
        self._degraded = False
        self._counters = Counters(shares)
        self._tickets: dict[T, Waiter[T]] = {}
        self._lines: dict[str, Line[T]] = {}
        self._ranks: list[tuple[float, int, str]] = []
        self._fifo: deque[Waiter[T]] = deque()
        self._due: list[tuple[float, int, Waiter[T]]] = []
        self._evicted: list[tuple[T, Verdict]] = []
        self._charged: dict[str, int] = {}
        self._numbers = self._turns = 0

    # What an admission may see

    @property
    def waiting(self) -> int:
        return len(self._tickets)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those who wait. O(waiting)."""
        return sum(waiter.ask.request.prompt_tokens for waiter in self._tickets.values())

    @property
    def busy(self) -> int:
        """Permits that weigh on available endpoints; answers still flowing from one that is ejected or leaves take
        nobody's place."""
        if not self._degraded:
            return self.in_flight
        loads = [each.load for each in self._candidates if not each.load.available]
        return max(0, self.in_flight - sum(load.in_flight - load.others.in_flight for load in (*loads, *self._leaving)))

    def ahead(self, tenant: str) -> float:
        """How many would go in before a newcomer of the tenant: of each other tenant as many as of its own, by weight.

        O(tenants in line).
        """
        mine, weight = self._lines.get(tenant), self._counters.weight
        size = mine.size if mine is not None else 0
        turns = (size + 1) / weight(tenant)
        others = (min(line.size, turns * weight(name)) for name, line in self._lines.items() if line is not mine)
        return size + sum(others)

    def first(self, tenant: str) -> bool:
        """Whether a newcomer of the tenant would be the next to go in. O(tenants in line)."""
        if not self._tickets:
            return True
        counter = self._counters.of(tenant)
        return tenant not in self._lines and all(line.counter >= counter for line in self._lines.values())

    def refresh(self, candidates: Sequence[Candidate], leaving: Sequence[EndpointLoad] = ()) -> None:
        """Endpoints came, went, or changed their availability. `settle` is due after it.

        `leaving` are those that are candidates no more; requests of before finish there.
        """
        for waiter in self._tickets.values():
            if waiter.candidates is self._candidates:
                waiter.candidates = candidates
        self._candidates = candidates
        self._leaving = [load for load in leaving if load.in_flight]
        self.capacity = verdicts.capacity(candidates)
        self._degraded = bool(self._leaving) or not all(candidate.load.available for candidate in candidates)

    def share(self, shares: FairShares) -> None:
        """From now on tenants have these shares."""
        self._counters.share(shares)

    # In and out

    def take(self) -> bool:
        """A permit, if it can be had without a thought: what nearly always holds."""
        if self._tickets or self.in_flight >= self.capacity or self._degraded or not self.admission.calm:
            return False
        self.in_flight += 1
        return True

    def arrive(
        self, ask: Ask, candidates: Sequence[Candidate], ticket: T, again: Callable[[float], Ask] | None = None
    ) -> Verdict:
        """The verdict on a newcomer. Wait: `ticket` is in line now, and `settle` will tell, at the latest after
        `timeout_s`. Otherwise it is forgotten; Admit has taken a permit, which `leave` gives back.

        `again` asks the same at another moment, for one who has waited: what is cached of its prompt changes.
        """
        verdict = self.knock(ask, candidates)
        if isinstance(verdict, Wait):
            return self._line_up(Waiter(ask, candidates, ticket, verdict.timeout_s, again))
        return verdict

    def knock(self, ask: Ask, candidates: Sequence[Candidate]) -> Verdict:
        """As arrive(), for one who goes away where it would have to wait: it takes nobody's chair."""
        self.at_door = True
        try:
            verdict = self.admission.judge(ask, candidates, self)
        finally:
            self.at_door = False
        if isinstance(verdict, Admit):
            self.in_flight += 1
        return verdict

    def booked(self, ask: Ask, pick: Pick) -> None:
        """One with a permit was picked an endpoint: its tenant pays."""
        request = ask.request
        tokens = charged_tokens(request, pick.cached_tokens) - self._charged.pop(request.id, 0)
        self._charge(request.tenant, tokens)
        self.admission.booked(ask, pick)

    def leave(self, request: Request, outcome: Outcome) -> None:
        """A permit is given back. `settle` is due after it."""
        self.gone(outcome.now)
        self.ended(request, outcome)

    def gone(self, now: float) -> None:
        """The first half of `leave`: the place is free. For callers that tell how it ended elsewhere."""
        self.in_flight -= 1
        self.drain.completed(now)

    def withdraw(self) -> None:
        """A permit is given back by one who had no use for it. `settle` is due after it."""
        self.in_flight -= 1

    def unbooked(self, request: Request) -> None:
        """One that had waited, was let in and found no endpoint, or left first: its tenant does not pay."""
        tokens = self._charged.pop(request.id, 0)
        if tokens:
            self._charge(request.tenant, -tokens)

    def ended(self, request: Request, outcome: Outcome) -> None:
        """The second half of `leave`, for one that was booked: what was charged as expected is put right."""
        self._charge(request.tenant, outcome.output_tokens - request.output_tokens)
        self.admission.ended(request, outcome)

    def cancel(self, ticket: T) -> bool:
        """The ticket's owner has left the line; False when it was not in it."""
        waiter = self._tickets.get(ticket)
        if waiter is not None:
            self._remove(waiter)
        return waiter is not None

    def tick(self, now: float) -> None:
        """The clockwork of whatever needs one, about every 100 ms. `settle` is due after it."""
        if not self._tickets:
            self._counters.fade(now)
        self.admission.tick(now, self._candidates)

    def next_due(self) -> float | None:
        """When `settle` must be called at the latest, whatever else happens; None while nobody waits."""
        while self._due and self._due[0][-1].gone:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def settle(self, now: float) -> list[tuple[T, Verdict]]:
        """Who may go in now and who is refused after all, in order. Each Admit has taken a permit."""
        out, self._evicted = self._evicted, []
        while (due := self.next_due()) is not None and due <= now:
            waiter = self._due[0][-1]
            self._remove(waiter)
            out.append((waiter.ticket, self._too_late(waiter, now)))
        while self._tickets and (found := self._next(now)) is not None:
            waiter, verdict, starved = found
            self._remove(waiter)
            if isinstance(verdict, Admit):
                self._go_in(waiter, starved)
            out.append((waiter.ticket, verdict))
        return out

    def charged_elsewhere(self, tenant: str, tokens: float) -> None:
        """Another gateway of the fleet did so much work for the tenant."""
        self._charge(tenant, tokens)

    # The line

    def _line_up(self, waiter: Waiter[T]) -> Verdict:
        request = waiter.ask.request
        if waiter.due_s <= waiter.arrived_s:
            return self._too_late(waiter, waiter.arrived_s)
        if len(self._tickets) >= self.limits.size and not self._make_room(request.tenant, waiter.arrived_s):
            return verdicts.full(self, waiter.arrived_s)
        if not self._tickets:
            self._counters.fade(waiter.arrived_s)
            self._counters.contended()
        self._tickets[waiter.ticket] = waiter
        self.waiting_s += waiter.own_s
        self._enqueue(waiter)
        return Wait(waiter.due_s - waiter.arrived_s)

    def _enqueue(self, waiter: Waiter[T]) -> None:
        request = waiter.ask.request
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = Line(self._counters.of(request.tenant))
            self._rank(request.tenant, line)
        self._numbers += 1
        heappush(line.heap, (-request.priority, waiter.must_begin_s, self._numbers, waiter))
        line.size += 1
        heappush(self._due, (waiter.due_s, self._numbers, waiter))
        self._fifo.append(waiter)

    def _rank(self, tenant: str, line: Line[T]) -> None:
        self._numbers += 1
        heappush(self._ranks, (line.counter, self._numbers, tenant))

    def _next(self, now: float) -> tuple[Waiter[T], Verdict, bool] | None:
        """Whose turn it is, what becomes of it, and whether that is for having waited so long; None: all go on waiting.

        An admission may hold one tenant back where it would let in another, so that a few of them are asked.
        """
        first, starved = self._head(now)
        verdict = self._judged(first, now)
        if not isinstance(verdict, Wait):
            return first, verdict, starved
        if len(self._lines) > 1:
            for name in nsmallest(TENANTS_ASKED, self._lines, key=lambda name: self._lines[name].counter):
                other = self._lines[name].first()
                if other is not first and not isinstance(verdict := self._judged(other, now), Wait):
                    return other, verdict, False
        return None

    def _judged(self, waiter: Waiter[T], now: float) -> Verdict:
        if waiter.again is not None and now - waiter.looked_s >= LOOK_AGAIN_S:
            waiter.ask, waiter.looked_s = waiter.again(now), now
        return self.admission.judge(msgspec.structs.replace(waiter.ask, now=now), waiter.candidates, self)

    def _head(self, now: float) -> tuple[Waiter[T], bool]:
        """Whose turn it is, and whether that is for having waited so long. Only while somebody waits."""
        while self._fifo[0].gone:
            self._fifo.popleft()
        oldest = self._fifo[0]
        if self._turns >= STARVED_EVERY - 1 and now - oldest.arrived_s >= self.limits.starvation_s:
            return oldest, True
        while True:
            counter, _, tenant = self._ranks[0]
            line = self._lines.get(tenant)
            if line is not None and line.counter == counter:
                return line.first(), False
            heappop(self._ranks)

    def _go_in(self, waiter: Waiter[T], starved: bool) -> None:
        request = waiter.ask.request
        self.in_flight += 1
        self._turns = 0 if starved else self._turns + 1
        counter = self._counters.of(request.tenant)
        if all(line.counter >= counter for line in self._lines.values()):
            self._counters.served(counter)
        if len(self._charged) >= CHARGES_REMEMBERED:
            self._charged.clear()
        self._charged[request.id] = waiter.tokens
        self._charge(request.tenant, waiter.tokens)

    def _charge(self, tenant: str, tokens: float) -> None:
        counter = self._counters.charge(tenant, tokens)
        line = self._lines.get(tenant)
        if line is not None and line.counter != counter:
            line.counter = counter
            self._rank(tenant, line)

    def _make_room(self, tenant: str, now: float) -> bool:
        """Whether somebody of a tenant with more people in line, by weight, has made place for this one's newcomer."""
        weight = self._counters.weight
        if not self._lines:  # a room without a chair
            return False
        crowd = max(self._lines, key=lambda name: self._lines[name].size / weight(name))
        line = self._lines.get(tenant)
        mine = (line.size if line is not None else 0) + 1
        if mine / weight(tenant) >= self._lines[crowd].size / weight(crowd):
            return False
        waiter = self._lines[crowd].last()
        self._remove(waiter)
        self._evicted.append((waiter.ticket, verdicts.full(self, now)))
        return True

    def _remove(self, waiter: Waiter[T]) -> None:
        tenant = waiter.ask.request.tenant
        waiter.gone = True
        del self._tickets[waiter.ticket]
        self.waiting_s = self.waiting_s - waiter.own_s if self._tickets else 0.0
        self._lines[tenant].size -= 1
        if not self._lines[tenant].size:
            del self._lines[tenant]
        if len(self._due) + len(self._fifo) + len(self._ranks) > 8 * len(self._tickets) + 64:
            self._sweep()

    def _sweep(self) -> None:
        """Forget those who are gone, so that memory follows who waits and not who has waited."""
        self._fifo = deque(waiter for waiter in self._fifo if not waiter.gone)
        self._due = [entry for entry in self._due if not entry[-1].gone]
        heapify(self._due)
        self._ranks = []
        for tenant, line in self._lines.items():
            line.heap = [entry for entry in line.heap if not entry[-1].gone]
            heapify(line.heap)
            self._rank(tenant, line)

    def _too_late(self, waiter: Waiter[T], now: float) -> Shed:
        if not waiter.by_deadline:
            return verdicts.timed_out(self, now)
        deadline_s = waiter.ask.request.deadline_s or now
        expected_s = self.drain.seconds_for(self.waiting + 1, now)
        return verdicts.past_deadline(self, waiter.own_s, deadline_s - now, expected_s)
