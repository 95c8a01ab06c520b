"""The wait queue of one pool: counts permits to run, orders waiting requests, and lets them enter.

WaitQueue does no I/O and reads no clock: time is an argument, and due verdicts are returned as a
list. A waiting request is identified by a ticket, any hashable value of the caller. An Admission
(admission_policy.py) decides whether a request may enter at all. Waiting requests enter in this
order:

1. A request that has waited longer than the starvation bound, but at most every fourth time, so
   that one tenant cannot get all turns.
2. A request of the tenant with the lowest usage counter (fairness.py).
3. Within a tenant, the request with the highest priority.
4. With equal priority, the request whose prefill must begin soonest to meet its TTFT budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Generic

import msgspec

from policies.admission import refusals
from policies.admission.admission_policy import (
    Admission,
    Admit,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
    WaitQueueLimits,
)
from policies.admission.drain_rate import DrainRate
from policies.admission.fairness import FairShares, TenantCounters, billable_tokens
from policies.admission.full_pool_rate import FullLoadRate
from policies.admission.gateway_share import total_capacity
from policies.admission.tenant_queue import T, TenantQueue, WaitingRequest
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

STARVED_EVERY = 4
MAX_TENANTS_TRIED = 4
CHARGES_REMEMBERED = 4096

BUSY_PER_TICK = 0.01
"""Weight of one tick in the running mean of requests in flight.

At ten ticks per second this is a time constant of 10 s.
"""

LOOK_AGAIN_S = 0.1
"""Minimum seconds between two prefix-cache lookups for the same waiting request."""


class WaitQueue(Generic[T]):
    """The wait queue of one pool: the permits to run, and the requests that wait for one.

    A permit allows one request to run in the pool until its end. Each request that arrives must end
    in one of three ways: a refusal, `cancel` (it stopped waiting) or `release` (it returned its
    permit).

    in_flight       permits in use
    capacity        maximum number of concurrent requests of all available endpoints
    is_new_arrival  whether the admission policy is deciding about a new request (for WaitQueueView)
    waiting_s       seconds of prefill that all waiting requests need together
    """

    __slots__ = (
        *(
            "_candidates",
            "_charged",
            "_counters",
            "_has_unavailable",
            "_due",
            "_evicted",
            "_fifo",
            "_full_rate",
            "_leaving",
            "_mean_in_flight",
            "_queues",
        ),
        *(
            "_sequence",
            "_ranks",
            "_tickets",
            "_turns_since_starved",
            "admission",
            "is_new_arrival",
            "capacity",
            "drain_rate",
            "in_flight",
        ),
        *("limits", "waiting_s"),
    )

    def __init__(
        self,
        admission: Admission,
        limits: WaitQueueLimits | None = None,
        shares: FairShares | None = None,
    ) -> None:
        self.admission = admission
        self.limits = limits or WaitQueueLimits()
        self.drain_rate = DrainRate()
        self.in_flight = self.capacity = 0
        self.waiting_s = self._mean_in_flight = 0.0
        self._full_rate = FullLoadRate()
        self.is_new_arrival = False
        self._candidates: Sequence[Candidate] = ()
        self._leaving: Sequence[EndpointLoad] = ()
        self._has_unavailable = False
        self._counters = TenantCounters(shares)
        self._tickets: dict[T, WaitingRequest[T]] = {}
        self._queues: dict[str, TenantQueue[T]] = {}
        self._ranks: list[tuple[float, int, str]] = []
        self._fifo: deque[WaitingRequest[T]] = deque()
        self._due: list[tuple[float, int, WaitingRequest[T]]] = []
        self._evicted: list[tuple[T, Verdict]] = []
        self._charged: dict[str, int] = {}
        self._sequence = self._turns_since_starved = 0

    # The properties of WaitQueueView, which admission policies read

    @property
    def waiting(self) -> int:
        return len(self._tickets)

    @property
    def queued_tokens(self) -> int:
        """Return the total prompt tokens of all waiting requests.

        Takes O(waiting requests) time.
        """
        return sum(waiter.query.request.prompt_tokens for waiter in self._tickets.values())

    @property
    def busy_permits(self) -> int:
        """Return how many requests run on available endpoints, each with a permit from this queue.

        Requests that still run on an ejected or removed endpoint are not counted.
        """
        if not self._has_unavailable:
            return self.in_flight
        loads = [
            candidate.load for candidate in self._candidates if not candidate.load.is_available
        ]
        return max(
            0,
            self.in_flight
            - sum(load.in_flight - load.peer_load.in_flight for load in (*loads, *self._leaving)),
        )

    def full_rate(self, now: float) -> float | None:
        """Return how many requests per second end while all permits are in use.

        Before that was measured, the recent rate is multiplied by all permits / used permits.
        Returns None if no request has ended yet.
        """
        per_s = self.drain_rate.per_s(now)
        if per_s is None:
            return None
        if self._full_rate.per_unit is not None:
            return max(1e-9, self._full_rate.per_unit * self.capacity)
        return per_s * max(1.0, self.capacity / max(1.0, self._mean_in_flight))

    def count_ahead(self, tenant: str) -> float:
        """Return how many waiting requests would enter before a new request of the tenant.

        Tenants enter in proportion to their weights, and the result takes that into account. Takes
        O(waiting tenants) time.
        """
        own, weight = self._queues.get(tenant), self._counters.weight
        size = own.size if own is not None else 0
        turns = (size + 1) / weight(tenant)
        others = (
            min(queue.size, turns * weight(name))
            for name, queue in self._queues.items()
            if queue is not own
        )
        return size + sum(others)

    def is_next(self, tenant: str) -> bool:
        """Return whether a new request of the tenant would enter before all waiting requests.

        Takes O(waiting tenants) time.
        """
        if not self._tickets:
            return True
        counter = self._counters.counter_of(tenant)
        return tenant not in self._queues and all(
            queue.counter >= counter for queue in self._queues.values()
        )

    def refresh(
        self, candidates: Sequence[Candidate], leaving: Sequence[EndpointLoad] = ()
    ) -> None:
        """Update the capacity after endpoints were added or removed, or became available or
        unavailable.

        leaving  loads of removed endpoints that still serve earlier requests

        Call `take_verdicts` afterwards.
        """
        for waiter in self._tickets.values():
            if waiter.candidates is self._candidates:
                waiter.candidates = candidates
        self._candidates = candidates
        self._leaving = [load for load in leaving if load.in_flight]
        self.capacity = total_capacity(candidates)
        self._has_unavailable = bool(self._leaving) or not all(
            candidate.load.is_available for candidate in candidates
        )

    def set_shares(self, shares: FairShares) -> None:
        """Replace the weights and reserved shares by which tenants share the pool."""
        self._counters.set_shares(shares)

    # Entering and leaving the queue

    def try_enter(self) -> bool:
        """Take a permit for a new request without a decision, if every request may enter now.

        A permit allows one request to run in the pool. Returns whether it was taken. This fast path
        skips the admission policy while permits are free and nothing waits.
        """
        if (
            self._tickets
            or self.in_flight >= self.capacity
            or self._has_unavailable
            or not self.admission.is_calm
        ):
            return False
        self.in_flight += 1
        return True

    def take_permit(self) -> bool:
        """Take a permit if one is free, ahead of all waiting requests.

        A permit allows one request to run in the pool. Returns whether it was taken.
        """
        is_free = self.busy_permits < self.capacity
        self.in_flight += is_free
        return is_free

    def arrive(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        ticket: T,
        again: Callable[[float], RoutingQuery] | None = None,
    ) -> Verdict:
        """Decide about a new request, queue it if it must wait, and return the verdict.

        - Admit: the request holds a permit to run until `release`.
        - Wait: it is queued. `take_verdicts` returns `ticket` with a verdict after `timeout_s` at
          the latest.
        - Shed: it is refused.

        query       the request, with the time
        candidates  the pool's endpoints with their loads
        ticket      any hashable value by which the caller recognises the request later
        again       function that rebuilds the query at a later time, because cached prefixes change
                    while the request waits; None: the query stays the same
        """
        verdict = self.decide_without_queueing(query, candidates)
        if isinstance(verdict, Wait):
            return self._add(WaitingRequest(query, candidates, ticket, verdict, again))
        return verdict

    def decide_without_queueing(
        self, query: RoutingQuery, candidates: Sequence[Candidate]
    ) -> Verdict:
        """Decide about a new request like `arrive`, but do not queue it if it must wait."""
        self.is_new_arrival = True
        try:
            verdict = self.admission.decide(query, candidates, self)
        finally:
            self.is_new_arrival = False
        if isinstance(verdict, Admit):
            self.in_flight += 1
        return verdict

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge the tenant of an admitted request for its tokens: it was sent to an endpoint.

        query  the request, with the time
        pick   the endpoint, with the number of prompt tokens that it has cached, which cost nothing
        """
        request = query.request
        tokens = billable_tokens(request, pick.cached_tokens) - self._charged.pop(request.id, 0)
        self._charge(request.tenant, tokens)
        self.admission.on_reserved(query, pick)

    def release(self, request: Request, outcome: RequestOutcome) -> None:
        """Release the permit of a request that has ended.

        Call `take_verdicts` afterwards, because a waiting request may now enter.
        """
        self.free_place(outcome.now)
        self.on_ended(request, outcome)

    def free_place(self, now: float) -> bool:
        """Take back the permit of a request that has ended; return whether any request waits.

        The caller must report the request's outcome separately, with `on_ended`.
        """
        self.in_flight -= 1
        self.drain_rate.record(now)
        return bool(self._tickets)

    def undo_admit(self) -> None:
        """Take back the permit of a request that was admitted but never ran.

        Call `take_verdicts` afterwards, because a waiting request may now enter.
        """
        self.in_flight -= 1

    def on_not_routed(self, request: Request) -> None:
        """Refund the tokens that a tenant was charged for a request that then found no endpoint."""
        tokens = self._charged.pop(request.id, 0)
        if tokens:
            self._charge(request.tenant, -tokens)

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """Correct a tenant's charge by the answer's length; report the outcome to the policy."""
        self._charge(request.tenant, outcome.output_tokens - request.output_tokens)
        self.admission.on_ended(request, outcome)

    def cancel(self, ticket: T) -> bool:
        """Remove a waiting request by its ticket. Returns whether it was waiting."""
        waiter = self._tickets.get(ticket)
        if waiter is not None:
            self._remove(waiter)
        return waiter is not None

    def tick(self, now: float) -> None:
        """Run the periodic work of the wait queue.

        Call it about every 100 ms, and `take_verdicts` afterwards.
        """
        if not self._tickets:
            self._counters.forgive(now)
        self._mean_in_flight += BUSY_PER_TICK * (self.in_flight - self._mean_in_flight)
        if self._tickets and self.capacity:
            rate = self.drain_rate.per_s(now)
            self._full_rate.learn(now, rate / self.capacity if rate else None)
        self.admission.tick(now, self._candidates)

    def next_due(self) -> float | None:
        """Return when `take_verdicts` must be called at the latest, for the next timeout.

        The time is in seconds on the policy clock; None while no request waits.
        """
        while self._due and self._due[0][-1].is_removed:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def take_verdicts(self, now: float) -> list[tuple[T, Verdict]]:
        """Return the verdicts on all requests that may enter or must leave the queue at `now`.

        The result contains (ticket, verdict) for each of them, in order. These requests leave the
        queue. A request with the verdict Admit holds a permit from now on.
        """
        verdicts_due, self._evicted = self._evicted, []
        while (due := self.next_due()) is not None and due <= now:
            waiter = self._due[0][-1]
            self._remove(waiter)
            verdicts_due.append((waiter.ticket, self._shed_late(waiter, now)))
        while self._tickets and (turn := self._next(now)) is not None:
            waiter, verdict, is_starved = turn
            self._remove(waiter)
            if isinstance(verdict, Admit):
                self._admit(waiter, is_starved)
            verdicts_due.append((waiter.ticket, verdict))
        return verdicts_due

    def charge_peer_work(self, tenant: str, tokens: float) -> None:
        self._charge(tenant, tokens)

    # The order of waiting requests

    def _add(self, waiter: WaitingRequest[T]) -> Verdict:
        request = waiter.query.request
        if waiter.due_s <= waiter.arrived_s:
            return self._shed_late(waiter, waiter.arrived_s)
        if len(self._tickets) >= self.limits.size and not self._make_room(
            request.tenant, waiter.arrived_s
        ):
            return refusals.shed_queue_full(self, self._retry_after_s(waiter, waiter.arrived_s))
        if not self._tickets:
            self._counters.forgive(waiter.arrived_s)
            self._counters.stop_forgiving()
        self._tickets[waiter.ticket] = waiter
        self.waiting_s += waiter.prefill_s
        self._enqueue(waiter)
        return Wait(waiter.due_s - waiter.arrived_s)

    def _enqueue(self, waiter: WaitingRequest[T]) -> None:
        request = waiter.query.request
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = TenantQueue(
                self._counters.counter_of(request.tenant)
            )
            self._rank(request.tenant, queue)
        self._sequence += 1
        heappush(queue.heap, (-request.priority, waiter.must_begin_s, self._sequence, waiter))
        queue.size += 1
        heappush(self._due, (waiter.due_s, self._sequence, waiter))
        self._fifo.append(waiter)

    def _rank(self, tenant: str, queue: TenantQueue[T]) -> None:
        self._sequence += 1
        heappush(self._ranks, (queue.counter, self._sequence, tenant))

    def _next(self, now: float) -> tuple[WaitingRequest[T], Verdict, bool] | None:
        # Return the next request that enters or is refused, its verdict, and whether starvation
        # chose it.
        #
        # Return None if all must keep waiting. An admission may hold one tenant back and admit
        # another, so several tenants are tried.
        head, is_starved = self._head(now)
        verdict = self._verdict(head, now)
        if not isinstance(verdict, Wait):
            return head, verdict, is_starved
        if len(self._queues) > 1:
            for name in nsmallest(
                MAX_TENANTS_TRIED, self._queues, key=lambda name: self._queues[name].counter
            ):
                other = self._queues[name].first()
                if other is not head and not isinstance(verdict := self._verdict(other, now), Wait):
                    return other, verdict, False
        return None

    def _verdict(self, waiter: WaitingRequest[T], now: float) -> Verdict:
        if waiter.requery is not None and now - waiter.last_lookup_s >= LOOK_AGAIN_S:
            waiter.query, waiter.last_lookup_s = waiter.requery(now), now
        return self.admission.decide(
            msgspec.structs.replace(waiter.query, now=now), waiter.candidates, self
        )

    def _head(self, now: float) -> tuple[WaitingRequest[T], bool]:
        # Return the request whose turn it is, and whether it was chosen because of starvation.
        #
        # Requires at least one waiting request.
        while self._fifo[0].is_removed:
            self._fifo.popleft()
        oldest = self._fifo[0]
        if (
            self._turns_since_starved >= STARVED_EVERY - 1
            and now - oldest.arrived_s >= self.limits.starvation_s
        ):
            return oldest, True
        while True:
            counter, _, tenant = self._ranks[0]
            queue = self._queues.get(tenant)
            if queue is not None and queue.counter == counter:
                return queue.first(), False
            heappop(self._ranks)

    def _admit(self, waiter: WaitingRequest[T], is_starved: bool) -> None:
        request = waiter.query.request
        self.in_flight += 1
        self._turns_since_starved = 0 if is_starved else self._turns_since_starved + 1
        counter = self._counters.counter_of(request.tenant)
        if all(queue.counter >= counter for queue in self._queues.values()):
            self._counters.advance_to(counter)
        if len(self._charged) >= CHARGES_REMEMBERED:
            self._charged.clear()
        self._charged[request.id] = waiter.tokens
        self._charge(request.tenant, waiter.tokens)

    def _charge(self, tenant: str, tokens: float) -> None:
        counter = self._counters.charge(tenant, tokens)
        queue = self._queues.get(tenant)
        if queue is not None and queue.counter != counter:
            queue.counter = counter
            self._rank(tenant, queue)

    def _make_room(self, tenant: str, now: float) -> bool:
        # Evict a request of the tenant with the longest queue by weight.
        #
        # Return whether one was evicted. The least urgent request is evicted, and only if that
        # queue is longer than the queue of `tenant`.
        weight = self._counters.weight
        if not self._queues:  # the queue has size 0
            return False
        longest = max(self._queues, key=lambda name: self._queues[name].size / weight(name))
        queue = self._queues.get(tenant)
        own_size = (queue.size if queue is not None else 0) + 1
        if own_size / weight(tenant) >= self._queues[longest].size / weight(longest):
            return False
        waiter = self._queues[longest].last()
        self._remove(waiter)
        self._evicted.append(
            (waiter.ticket, refusals.shed_queue_full(self, self._retry_after_s(waiter, now)))
        )
        return True

    def _remove(self, waiter: WaitingRequest[T]) -> None:
        tenant = waiter.query.request.tenant
        waiter.is_removed = True
        del self._tickets[waiter.ticket]
        self.waiting_s = self.waiting_s - waiter.prefill_s if self._tickets else 0.0
        self._queues[tenant].size -= 1
        if not self._queues[tenant].size:
            del self._queues[tenant]
        if len(self._due) + len(self._fifo) + len(self._ranks) > 8 * len(self._tickets) + 64:
            self._sweep()

    def _retry_after_s(self, waiter: WaitingRequest[T], now: float) -> float | None:
        query = msgspec.structs.replace(waiter.query, now=now)
        return self.admission.retry_after_s(query, waiter.candidates, self)

    def _sweep(self) -> None:
        # Rebuild the heaps without removed entries, so that memory follows the current queue
        # length.
        self._fifo = deque(waiter for waiter in self._fifo if not waiter.is_removed)
        self._due = [entry for entry in self._due if not entry[-1].is_removed]
        heapify(self._due)
        self._ranks = []
        for tenant, queue in self._queues.items():
            queue.heap = [entry for entry in queue.heap if not entry[-1].is_removed]
            heapify(queue.heap)
            self._rank(tenant, queue)

    def _shed_late(self, waiter: WaitingRequest[T], now: float) -> Shed:
        if not waiter.has_deadline:
            return refusals.shed_timed_out(self, self._retry_after_s(waiter, now))
        deadline_s = waiter.query.request.deadline_s or now
        return refusals.shed_past_deadline(self, waiter.prefill_s, deadline_s - now)
