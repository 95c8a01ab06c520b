"""The interface of admission policies, their verdicts (admit, wait, refuse) and texts of refusals.

It also has the measured drain rate. The wait queue is in wait_queue.py, concurrency caps are in
cap_admission.py, and refusal by price is in priced_admission.py. The gateway converts a refusal to
an HTTP response.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1, inf
from typing import Protocol

import msgspec

from policies.routing_types import Candidate, Pick, Request, RoutingQuery


class Admit(msgspec.Struct, frozen=True):
    """The verdict that a request may enter the pool now."""


class Wait(msgspec.Struct, frozen=True):
    """The verdict that a request waits in the queue, for at most `timeout_s` seconds.

    is_reserved  whether the client has retried at its reserved time, so that the request is served
                 before others
    """

    timeout_s: float
    is_reserved: bool = False


class Shed(msgspec.Struct, frozen=True):
    """The verdict that a request is refused.

    reason         short label for logs and metrics, listed in docs/admission.md
    retry_after_s  seconds after which the client should retry; None: nothing was measured yet
    detail         the numbers that led to the refusal, for the client's error message
    may_return     whether a retry can help; if not, `retry_after_s` is None
    """

    reason: str
    retry_after_s: float | None
    detail: str = ""
    may_return: bool = True


Verdict = Admit | Wait | Shed
ADMIT = Admit()


class RequestOutcome(msgspec.Struct, frozen=True):
    """How an admitted request ended. Policies that learn from requests get it as input.

    now            when the request ended, in seconds on the policy clock
    ttft_s         seconds from arrival at the gateway to the first token; None: no token came
    tpot_s         mean seconds per output token after the first; None: fewer than two tokens came
    output_tokens  number of generated tokens
    cached_tokens  prompt tokens that the engine reported as cached; None: it reported none
    status         served, dropped (it failed or timed out) or ignored (the client disconnected)
    """

    now: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    status: str = "served"


class WaitQueueLimits(msgspec.Struct, frozen=True):
    """The limits of a pool's queue of waiting requests.

    size          maximum number of waiting requests
    timeout_s     maximum seconds that a request waits
    starvation_s  seconds of waiting after which a request is served before more urgent ones
    """

    size: int = 256
    timeout_s: float = 30.0
    starvation_s: float = 10.0


def shed_until(reason: str, retry_after_s: float | None, detail: str) -> Shed:
    """Build the refusal of a request, with the time after which its client should retry.

    reason         short label for logs and metrics
    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    detail         the numbers that led to the refusal
    """
    if retry_after_s == inf:
        return Shed(reason, None, detail, may_return=False)
    return Shed(reason, retry_after_s, detail)


class DrainRate:
    """The rate of completed requests (or seconds of work) per second, an exponentially decaying
    mean.

    The time constant is `tau_s` seconds. The rate is None (unknown) before the second completion,
    and again after a long silence. The object is not thread-safe.
    """

    __slots__ = ("_began", "_last", "_presence", "_tau_s", "_weight")

    def __init__(self, tau_s: float = 10.0) -> None:
        if tau_s <= 0:
            raise ValueError(f"the time constant tau_s must be positive, not {tau_s}")
        self._tau_s = tau_s
        self._began: float | None = None
        self._last = self._weight = self._presence = 0.0

    def record(self, now: float, amount: float = 1.0) -> None:
        """Record that `amount` of work was completed at the time `now`.

        `now` is in seconds, on a clock that never goes back.
        """
        if self._began is None:
            self._began = now
        else:
            decay = exp((self._last - now) / self._tau_s)
            self._weight = self._weight * decay + amount
            self._presence = self._presence * decay + 1.0
        self._last = now

    def per_s(self, now: float) -> float | None:
        """Return the amount of work completed per second around `now`, or None if unknown.

        The decayed sum is divided by the decayed length of the measurement, so that it is correct
        from the first seconds on. The first completion only starts the measurement.
        """
        if self._began is None:
            return None
        span = self._tau_s * -expm1((self._began - now) / self._tau_s)
        decay = exp((self._last - now) / self._tau_s)
        return self._weight * decay / span if span > 0 and self._presence * decay > 0.05 else None

    def seconds_for(self, amount: float, now: float) -> float | None:
        """Return how many seconds `amount` of work takes at the measured rate; None: rate
        unknown.
        """
        rate = self.per_s(now)
        return amount / rate if rate else None


class AdmissionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class for the parameters of an admission policy; every parameter has a default.

    Each `build()` returns a new, independent Admission.
    """

    def build(self) -> Admission:
        raise NotImplementedError(
            f"the parameter class {type(self).__name__} must implement build()"
        )


class WaitQueueView(Protocol):
    """The read-only view of a pool's wait queue that an Admission gets.

    A permit allows one request to run in the pool, from its admission to its end.

    busy_permits    permits of requests that run on available endpoints
    capacity        number of permits: the sum of the concurrency caps of all available endpoints
    waiting         number of requests in the queue
    waiting_s       seconds of prefill that all waiting requests need together
    is_new_arrival  True: the request has just arrived; False: it is at the head of the queue
    drain_rate      measured rate of completed requests per second
    limits          configured limits of the queue
    """

    @property
    def busy_permits(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def waiting_s(self) -> float: ...
    @property
    def is_new_arrival(self) -> bool: ...
    @property
    def drain_rate(self) -> DrainRate: ...
    @property
    def limits(self) -> WaitQueueLimits: ...

    def full_rate(self, now: float) -> float | None:
        """Return how many requests per second end while all permits are in use; None: not
        measured yet.
        """
        ...

    def is_next(self, tenant: str) -> bool:
        """Return whether a new request of this tenant would enter before all waiting ones."""
        ...

    def count_ahead(self, tenant: str) -> float:
        """Return how many waiting requests would enter before a new request of this tenant."""
        ...


class Admission(Protocol):
    """The interface of an admission policy, which decides which requests may enter one pool.

    It reads the time only from `query.now`, and random numbers only from `query.rng`.

    name            its name in the registry of admission policies
    is_calm         whether every request may enter as long as a permit is free; the queue then
                    admits requests without calling `decide`
    reads_forecast  whether it reads the learned speed, engine model or forecast of an EndpointLoad
    reads_sessions  whether it reads the session of a request
    """

    @property
    def name(self) -> str: ...

    @property
    def is_calm(self) -> bool: ...

    @property
    def reads_forecast(self) -> bool: ...

    @property
    def reads_sessions(self) -> bool: ...

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        """Return the verdict on a request that has just arrived, or that waits at the queue's head.

        query       the request, with the time and the random generator
        candidates  the pool's endpoints with their loads
        queue       the wait queue; `queue.is_new_arrival` states which of the two cases it is
        """
        ...

    def retry_after_s(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> float | None:
        """Reserve capacity for the retry of a request that the wait queue refuses.

        Returns the seconds until the retry. The result is inf if the client should not retry, and
        None if nothing was measured yet.
        """
        ...

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Record that an admitted request was assigned to an endpoint.

        query  the request, with the time
        pick   the chosen endpoint
        """
        ...

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """Record how a request ended. `on_reserved` must have been called for it."""
        ...

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Run the periodic work of the admission policy.

        The gateway calls it about every 100 ms, but perhaps not while the pool is idle.

        now         time in seconds
        candidates  the pool's endpoints with their loads
        """
        ...


def occupancy_text(queue: WaitQueueView, expected_s: float | None) -> str:
    """Return the part of a refusal message that describes how full the wait queue is.

    `expected_s` is the expected seconds until a permit is free; None: unknown.
    """
    running = f"The pool has {queue.busy_permits} of at most {queue.capacity} requests running"
    text = f"{running} and {queue.waiting} waiting"
    if expected_s == inf:
        return f"{text}; no capacity is expected in the next minutes"
    return text if expected_s is None else f"{text}; capacity is expected in {expected_s:.1f} s"


def shed_no_capacity() -> Shed:
    """Return the refusal of a request to a pool without an available endpoint.

    It has no Retry-After.
    """
    return Shed("no_capacity", None, "No endpoint is available.")


def shed_early(early_s: float) -> Shed:
    """Return the refusal of a request that came `early_s` seconds before its Retry-After time."""
    text = f"This request came before its Retry-After time, which is in {early_s:.1f} s."
    return Shed("early", early_s, text)


def shed_queue_full(queue: WaitQueueView, retry_after_s: float | None) -> Shed:
    """Return the refusal of a request that arrived while the wait queue was full.

    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    """
    text = f"The wait queue is full. {occupancy_text(queue, retry_after_s)}."
    return shed_until("waiting_room_full", retry_after_s, text)


def shed_timed_out(queue: WaitQueueView, retry_after_s: float | None) -> Shed:
    """Return the refusal of a request that has waited in the queue for the maximum time.

    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    """
    text = f"No endpoint became free in time. {occupancy_text(queue, retry_after_s)}."
    return shed_until("waited_too_long", retry_after_s, text)


def shed_past_deadline(queue: WaitQueueView, needed_s: float, left_s: float) -> Shed:
    """Return the final refusal of a request whose client would give up before the first token.

    needed_s  seconds until the first token is expected
    left_s    seconds until the client gives up
    """
    patience = f"The client gives up in {max(0.0, left_s):.1f} s"
    text = f"{patience} and the first token is expected in {needed_s:.1f} s"
    return Shed("deadline", None, f"{text}. {occupancy_text(queue, None)}.", may_return=False)
