"""The queue of one tenant's waiting requests, most urgent first.

A WaitQueue (wait_queue.py) has one such queue per tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop
from math import inf
from typing import Generic, TypeVar

from policies.admission.admission_policy import Wait
from policies.admission.fairness import billable_tokens
from policies.pricing.admission_cost import estimate_cost
from policies.routing_types import Candidate, RoutingQuery

T = TypeVar("T", bound=Hashable)


class WaitingRequest(Generic[T]):
    """A request in the wait queue of a pool.

    due_s         when its wait ends: at its timeout, or when prefill would begin too late for the
                  client's deadline
    must_begin_s  when prefill must begin to meet the TTFT budget; -inf for a retry with a
                  reservation
    requery       function that rebuilds its query at a later time; None: the query stays the same
    """

    __slots__ = (
        *(
            "requery",
            "arrived_s",
            "query",
            "has_deadline",
            "candidates",
            "due_s",
            "is_removed",
            "last_lookup_s",
            "must_begin_s",
        ),
        *("prefill_s", "ticket", "tokens"),
    )

    def __init__(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        ticket: T,
        wait: Wait,
        again: Callable[[float], RoutingQuery] | None,
    ) -> None:
        request, estimate = query.request, estimate_cost(query, candidates)
        self.query, self.candidates, self.ticket, self.requery = query, candidates, ticket, again
        self.arrived_s = self.last_lookup_s = query.now
        self.prefill_s = estimate.prefill_s
        self.tokens = billable_tokens(request, estimate.cached_tokens)
        self.due_s = query.now + wait.timeout_s
        first_token_due_s = (request.arrived_s or query.now) + request.slo.ttft_s
        self.has_deadline = (
            request.deadline_s is not None and request.deadline_s - self.prefill_s < self.due_s
        )
        if request.deadline_s is not None:
            first_token_due_s = min(first_token_due_s, request.deadline_s)
            self.due_s = min(self.due_s, request.deadline_s - self.prefill_s)
        self.must_begin_s = -inf if wait.is_reserved else first_token_due_s - self.prefill_s
        self.is_removed = False


class TenantQueue(Generic[T]):
    """The waiting requests of one tenant, most urgent first (a heap).

    `counter` is how many tokens the tenant has used; the tenant with the lowest counter is served
    next.
    """

    __slots__ = ("counter", "heap", "size")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.heap: list[tuple[int, float, int, WaitingRequest[T]]] = []
        self.size = 0

    def first(self) -> WaitingRequest[T]:
        while self.heap[0][-1].is_removed:
            heappop(self.heap)
        return self.heap[0][-1]

    def last(self) -> WaitingRequest[T]:
        return max(entry for entry in self.heap if not entry[-1].is_removed)[-1]
