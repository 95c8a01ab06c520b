"""The admission policies `cap` (concurrency caps, and a limit on sessions) and `none`."""

from __future__ import annotations

from collections.abc import Sequence

from policies.admission.adaptive_session_limit import SessionGate, WorkingSet
from policies.admission.admission_policy import (
    ADMIT,
    Admission,
    AdmissionParams,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
    WaitQueueView,
)
from policies.admission.refusals import (
    occupancy_text,
    shed_early,
    shed_no_capacity,
    shed_past_deadline,
    shed_queue_full,
    shed_until,
)
from policies.admission.retry_after import ReturnSchedule, request_key
from policies.admission.session_refusals import ON_EVIDENCE, SessionLimit
from policies.prefix.prefix_match import longest_match
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

KEPT = 0.25
"""Share of the wait queue (0 to 1) that new requests may not fill.

It is kept free for refused clients that retry at the time that their Retry-After header gave.
"""


class CapAdmission:
    """An admission policy with only concurrency caps: a request enters when a permit is free.

    A permit allows one request to run in the pool. Other requests wait. A new request is refused at
    once if it would wait longer than its timeout or its client's deadline, at the measured drain
    rate: an early refusal is better for the client than a late one. The refusal has a Retry-After
    time, for which a part of the queue is reserved.
    """

    __slots__ = ("_schedule", "is_calm", "name", "reads_forecast", "reads_sessions")

    def __init__(self) -> None:
        self.name = "cap"
        self.is_calm = True
        self.reads_forecast = self.reads_sessions = False
        self._schedule = ReturnSchedule()

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        is_free = queue.busy_permits < queue.capacity
        if not queue.is_new_arrival:
            return ADMIT if is_free else Wait(queue.limits.timeout_s)
        if queue.capacity <= 0:
            return shed_no_capacity()
        key = request_key(query) if len(self._schedule) else None
        is_reserved = self._schedule.is_due(key, query.now)
        if not is_free or (queue.waiting and not is_reserved):
            refused = self._refusal(query, candidates, queue, is_reserved)
            if refused is not None:
                return refused
        self._schedule.remove(key)
        if is_free and (is_reserved or not queue.waiting):
            return ADMIT
        return Wait(queue.limits.timeout_s, is_reserved)

    def _refusal(
        self,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        queue: WaitQueueView,
        is_reserved: bool,
    ) -> Shed | None:
        # Return the refusal of a new request that may not wait in the queue.
        #
        # Return None if it may wait.
        rate, deadline_s = queue.full_rate(query.now), query.request.deadline_s
        expected_s = self._expected_s(query, queue, rate, is_reserved) if rate else None
        if (
            expected_s is not None
            and deadline_s is not None
            and query.now + expected_s > deadline_s
        ):
            return shed_past_deadline(queue, expected_s, deadline_s - query.now)
        if is_reserved:
            return None
        # While clients have times to return, new ones leave a part of the queue to them.
        is_full = len(self._schedule) > 0 and queue.waiting >= (1.0 - KEPT) * queue.limits.size
        is_slow = expected_s is not None and expected_s > queue.limits.timeout_s
        if not is_slow and not is_full:
            return None
        key = request_key(query) if len(self._schedule) else None
        early_s = self._schedule.seconds_early(key, query.now)
        if early_s is not None:
            return shed_early(early_s)
        retry_after_s = self.retry_after_s(query, candidates, queue)
        if not is_slow:
            return shed_queue_full(queue, retry_after_s)
        text = f"The wait of {expected_s:.1f} s would be longer than the wait queue allows"
        text = f"{text}. {occupancy_text(queue, retry_after_s)}."
        return shed_until("too_slow", retry_after_s, text)

    def _expected_s(
        self, query: RoutingQuery, queue: WaitQueueView, rate: float, is_reserved: bool
    ) -> float:
        # Return the expected seconds until a new request would get a permit.
        #
        # `rate` is permits per second.
        if is_reserved:
            return 1.0 / rate
        left = 1.0 - self._schedule.share if len(self._schedule) else 1.0
        return (queue.count_ahead(query.request.tenant) + 1) / (rate * max(KEPT, left))

    def retry_after_s(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> float | None:
        """Reserve a time for the retry of a refused request, and return the seconds until then.

        Times are given out one after another at the measured drain rate, as if all requests were
        equal work. The result is inf if the client should not retry, and None if no rate is known
        yet.
        """
        if not query.can_return:
            return None
        rate = queue.full_rate(query.now)
        return self._schedule.schedule(request_key(query), 1.0, rate, 0.0, query)

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Do nothing: the wait queue itself counts the permits."""

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """Do nothing: a concurrency cap learns nothing from how requests end."""

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Do nothing: a concurrency cap has no periodic work."""


class UncappedAdmission(CapAdmission):
    """An admission policy that admits every request as long as an endpoint is available.

    It suits engines that refuse excess load themselves.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"
        self.is_calm = False

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        return ADMIT if queue.capacity > 0 else shed_no_capacity()


class CapParams(AdmissionParams, frozen=True):
    """The parameters of an admission policy with concurrency caps and a limit on sessions.

    sessions  parameters of the limit on sessions; None: there is no limit
    """

    sessions: SessionGate | None = ON_EVIDENCE

    def build(self) -> Admission:
        return CapAdmission() if self.sessions is None else SessionCap(self.sessions)


class SessionCap(CapAdmission):
    """An admission policy with a cap on concurrent requests, and a limit on the number of sessions.

    A new session is refused if its context and the contexts of all active sessions would not fit
    the fleet's KV memory. CapAdmission's rules apply to requests without a session, and to all
    requests while there is no limit on sessions.
    """

    __slots__ = ("_limit",)

    def __init__(self, gate: SessionGate) -> None:
        super().__init__()
        self.reads_sessions = True
        self._limit = SessionLimit(gate)
        self.is_calm = not self.sessions.is_limited

    @property
    def sessions(self) -> WorkingSet:
        """Return the active sessions, whose contexts together should fit the fleet's KV memory."""
        return self._limit.sessions

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        if queue.is_new_arrival:
            cached_tokens = longest_match(query.cached_by_slot)
            refused = self._limit.refusal(query, candidates, cached_tokens)
            if refused is not None:
                return refused
        return super().decide(query, candidates, queue)

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        self._limit.on_reserved(query, pick)

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        self._limit.on_ended(request, outcome)

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        self.sessions.tick(now, candidates)
        self.is_calm = not self.sessions.is_limited
