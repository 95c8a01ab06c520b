"""Admission: let a request enter, make it wait, or refuse it with an honest Retry-After.

Contains the verdicts, the Admission protocol, the drain rate it measures and the plain cap. Waiting
is in wait_queue.py, the price in priced.py, the session gate in policies/admission/sessions.py, the
HTTP form of a refusal in the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, expm1
from typing import Protocol

import msgspec

from policies.model import Candidate, Pick, Request, RoutingQuery


class Admit(msgspec.Struct, frozen=True):
    """Enter now."""


class Wait(msgspec.Struct, frozen=True):
    """Wait in the queue for at most `timeout_s`."""

    timeout_s: float


class Shed(msgspec.Struct, frozen=True):
    """Refuse. `retry_after_s` is when a place is expected; None if nothing was measured yet.

    reason   short label for logs and metrics, listed in docs/admission.md
    detail   the numbers behind it, for the client's error message
    """

    reason: str
    retry_after_s: float | None
    detail: str = ""


Verdict = Admit | Wait | Shed
ADMIT = Admit()


class RequestOutcome(msgspec.Struct, frozen=True):
    """How an admitted request ended: input of admissions and stateful policies. None means unknown.

    now            seconds on the policy clock
    ttft_s         from arrival at the gateway to the first token; None if there was none
    tpot_s         mean seconds per further output token; None below two tokens
    cached_tokens  prompt tokens that the engine reported as cached
    status         served; dropped (it failed or ran out of time); ignored (the client disconnected)
    """

    now: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    status: str = "served"


class WaitQueueLimits(msgspec.Struct, frozen=True):
    """Size of a pool's wait queue, maximum wait, and wait after which none may overtake."""

    size: int = 256
    timeout_s: float = 30.0
    starvation_s: float = 10.0


class DrainRate:
    """Completions per second, or completed work per second, as a mean that decays with `tau_s`.

    One owner.

    None before the second completion, and after a silence so long that too little recent data is
    left.
    """

    __slots__ = ("_began", "_last", "_presence", "_tau_s", "_weight")

    def __init__(self, tau_s: float = 10.0) -> None:
        if tau_s <= 0:
            raise ValueError(f"tau_s is positive, not {tau_s}")
        self._tau_s = tau_s
        self._began: float | None = None
        self._last = self._weight = self._presence = 0.0

    def record(self, now: float, amount: float = 1.0) -> None:
        """Record that `amount` left at `now`, seconds on a clock that never goes back."""
        if self._began is None:
            self._began = now
        else:
            decay = exp((self._last - now) / self._tau_s)
            self._weight = self._weight * decay + amount
            self._presence = self._presence * decay + 1.0
        self._last = now

    def per_s(self, now: float) -> float | None:
        """Return the amount per second around `now`, or None.

        The decayed sum is divided by the decayed time it was gathered in, so it is unbiased from
        the first seconds on. The first completion only starts the clock.
        """
        if self._began is None:
            return None
        span = self._tau_s * -expm1((self._began - now) / self._tau_s)
        decay = exp((self._last - now) / self._tau_s)
        return self._weight * decay / span if span > 0 and self._presence * decay > 0.05 else None

    def seconds_for(self, amount: float, now: float) -> float | None:
        """Return how long `amount` takes to leave at the measured rate, or None."""
        rate = self.per_s(now)
        return amount / rate if rate else None


class AdmissionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an admission, all with defaults.

    Each `build()` returns an independent admission.
    """

    def build(self) -> Admission:
        raise NotImplementedError(f"{type(self).__name__} has no build()")


class WaitQueueView(Protocol):
    """What an admission may see of the wait queue that calls it.

    busy_permits    permits held on available endpoints
    capacity        concurrent requests of all available endpoints: the sum of their caps
    waiting         requests in the queue; waiting_s: their prefill seconds
    is_new_arrival  True if the request has just arrived, False if it is at the head of the queue
    drain_rate      requests that left, per second
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

    def is_next(self, tenant: str) -> bool:
        """Return whether a new request of this tenant would be the next to enter."""
        ...

    def count_ahead(self, tenant: str) -> float:
        """Return how many requests would enter before a new one of this tenant."""
        ...


class Admission(Protocol):
    """Decides which requests may enter a pool.

    One object per pool; its only clock is `query.now`, its only chance `query.rng`.

    name            its name in the registry
    is_calm         True while every request may enter as long as a place is free: enables the
                    queue's fast path
    reads_forecast  whether it reads the learned speed, engine model or forecast of an EndpointLoad
    reads_sessions  whether it reads the session of a Request
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
        """Decide about a new request, or again about the head of the queue when it may enter."""
        ...

    def on_booked(self, query: RoutingQuery, pick: Pick) -> None:
        """Handle that an admitted request was booked at an endpoint."""
        ...

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """Handle that a booked request has ended."""
        ...

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Run periodic work. Called about every 100 ms, not necessarily while the pool is idle."""
        ...


def total_capacity(candidates: Iterable[Candidate]) -> int:
    """Return how many requests this gateway may run at once on the available endpoints.

    This is the sum of the concurrency caps minus what other gateways use, but at least an equal
    share of each cap. A gateway that starts late is therefore not locked out.
    """
    total = 0
    for candidate in candidates:
        load, cap = candidate.load, candidate.endpoint.max_concurrency
        if load.is_available:
            peer_load = load.peer_load
            total += (
                max(cap - peer_load.in_flight, cap // (len(peer_load.shares) + 1))
                if peer_load.shares
                else cap
            )
    return total


def occupancy_text(queue: WaitQueueView, expected_s: float | None) -> str:
    """Return the numbers of a wait queue as text: the tail of most refusals."""
    taken = f"{queue.busy_permits} of {queue.capacity} places are taken"
    text = f"{taken} and {queue.waiting} requests wait"
    return text if expected_s is None else f"{text}; a place is expected in {expected_s:.1f} s"


def shed_no_capacity() -> Shed:
    """Refuse because no endpoint is available; when one will be is unknown."""
    return Shed("no_capacity", None, "No endpoint is available.")


def shed_queue_full(queue: WaitQueueView, now: float) -> Shed:
    """Refuse because the wait queue is full."""
    expected_s = queue.drain_rate.seconds_for(queue.waiting + 1, now)
    return Shed(
        "waiting_room_full",
        expected_s,
        f"The waiting room is full. {occupancy_text(queue, expected_s)}.",
    )


def shed_timed_out(queue: WaitQueueView, now: float) -> Shed:
    """Refuse a request that waited its full time. It is no longer counted in `queue.waiting`."""
    expected_s = queue.drain_rate.seconds_for(queue.waiting + 1, now)
    return Shed(
        "waited_too_long",
        expected_s,
        f"No endpoint became free in time. {occupancy_text(queue, expected_s)}.",
    )


def shed_past_deadline(
    queue: WaitQueueView, needed_s: float, left_s: float, expected_s: float | None
) -> Shed:
    """Refuse a request whose client will have given up before its first token."""
    patience = f"The client gives up in {max(0.0, left_s):.1f} s"
    text = f"{patience} and the first token is expected in {needed_s:.1f} s"
    return Shed("deadline", expected_s, f"{text}. {occupancy_text(queue, expected_s)}.")


class CapAdmission:
    """Concurrency caps only: enter while a place is free, wait while the queue has room.

    A new request that, at the measured drain rate, would time out or miss its client's deadline is
    refused at once. An early refusal is better for the client than a late one.
    """

    __slots__ = ("is_calm", "name", "reads_forecast", "reads_sessions")

    def __init__(self) -> None:
        self.name = "cap"
        self.is_calm = True
        self.reads_forecast = self.reads_sessions = False

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        if queue.busy_permits < queue.capacity and not (queue.is_new_arrival and queue.waiting):
            return ADMIT
        if not queue.is_new_arrival:
            return Wait(queue.limits.timeout_s)
        if queue.capacity <= 0:
            return shed_no_capacity()
        expected_s = queue.drain_rate.seconds_for(
            queue.count_ahead(query.request.tenant) + 1, query.now
        )
        if expected_s is not None and expected_s > queue.limits.timeout_s:
            text = "The wait would be longer than the waiting room allows"
            return Shed("too_slow", expected_s, f"{text}. {occupancy_text(queue, expected_s)}.")
        deadline_s = query.request.deadline_s
        if (
            expected_s is not None
            and deadline_s is not None
            and query.now + expected_s > deadline_s
        ):
            return shed_past_deadline(queue, expected_s, deadline_s - query.now, expected_s)
        return Wait(queue.limits.timeout_s)

    def on_booked(self, query: RoutingQuery, pick: Pick) -> None:
        """No-op: the wait queue counts the places."""

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """No-op: a cap learns nothing."""

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """No-op: a cap has no periodic work."""


class UncappedAdmission(CapAdmission):
    """Admit every request while an endpoint is available, for engines that shed load."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"
        self.is_calm = False

    def decide(
        self, query: RoutingQuery, candidates: Sequence[Candidate], queue: WaitQueueView
    ) -> Verdict:
        return ADMIT if queue.capacity > 0 else shed_no_capacity()
