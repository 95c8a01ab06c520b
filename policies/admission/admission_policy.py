"""The interface of admission policies, and their verdicts: admit, wait or refuse.

Refusals with their texts are in refusals.py, the measured drain rate in drain_rate.py, the wait
queue in wait_queue.py, concurrency caps in cap_admission.py, and refusal by price in
priced_admission.py. The gateway converts a refusal to an HTTP response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from policies.admission.drain_rate import DrainRate
from policies.routing_types import Candidate, Pick, Request, RoutingQuery


class Admit(msgspec.Struct, frozen=True):
    """The verdict of an admission policy that a request may enter the pool now."""


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
    """The limits of a pool's wait queue, in which requests wait until the pool has capacity.

    size          maximum number of waiting requests
    timeout_s     maximum seconds that a request waits; then it is refused
    starvation_s  seconds of waiting after which a request is served before more urgent ones
    """

    size: int = 256
    timeout_s: float = 30.0
    starvation_s: float = 10.0


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

        The wait queue calls this if it refuses a request itself, for example because it is full.
        Returns the seconds after which the client should retry: inf if the client should not retry,
        and None if nothing was measured yet.
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
