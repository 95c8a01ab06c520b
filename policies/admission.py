"""Admission: enter now, wait for room, or be refused at the door with an honest Retry-After.

Lives here: the verdicts, what an admission is asked and told, the measured drain it quotes, and the plain cap. Not
here: who waits (waiting.py), the price (dual.py), the session gate (sessions.py), what a refusal looks like on the wire
(gateway/answer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, expm1
from typing import Protocol

import msgspec

from policies.model import Ask, Candidate, Pick, Request


class Admit(msgspec.Struct, frozen=True):
    """There is room now."""


class Wait(msgspec.Struct, frozen=True):
    """Stand in line for at most `timeout_s`."""

    timeout_s: float


class Shed(msgspec.Struct, frozen=True):
    """Refuse. `retry_after_s` is when room is expected, None if nothing has been measured to tell.

    reason   a short label for logs and metrics (docs/admission.md lists them)
    detail   the numbers behind it in words, for the client's error message
    """

    reason: str
    retry_after_s: float | None
    detail: str = ""


Verdict = Admit | Wait | Shed
ADMIT = Admit()


class Outcome(msgspec.Struct, frozen=True):
    """How a request that had entered ended: what admissions and stateful policies learn from. None: not known.

    now            seconds on the policy clock
    ttft_s         from its arrival at the gateway to its first token; None when none came
    tpot_s         mean seconds per further output token; None below two tokens
    cached_tokens  prompt tokens that the engine says it found cached
    ended          served; dropped (its fault or the fleet's: it failed or ran out of time); ignored (the client left)
    """

    now: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    ended: str = "served"


class WaitingRoom(msgspec.Struct, frozen=True):
    """How many requests may wait for a pool, how long each, and from when on they may not be passed over."""

    size: int = 256
    timeout_s: float = 30.0
    starvation_s: float = 10.0


class DrainRate:
    """Amounts finished per second, recent ones weighing most (decaying with `tau_s`). One owner.

    An amount is 1 for a request, or its work in seconds. None before the second completion and after a silence so long
    that nothing recent is left to measure by.
    """

    __slots__ = ("_began", "_last", "_presence", "_tau_s", "_weight")

    def __init__(self, tau_s: float = 10.0) -> None:
        if tau_s <= 0:
            raise ValueError(f"tau_s is positive, not {tau_s}")
        self._tau_s = tau_s
        self._began: float | None = None
        self._last = self._weight = self._presence = 0.0

    def completed(self, now: float, amount: float = 1.0) -> None:
        """So much left at `now`, seconds on the caller's clock; never goes back."""
        if self._began is None:
            self._began = now
        else:
            decay = exp((self._last - now) / self._tau_s)
            self._weight = self._weight * decay + amount
            self._presence = self._presence * decay + 1.0
        self._last = now

    def per_s(self, now: float) -> float | None:
        """Amount per second around `now`.

        The decayed sum divided by the decayed time it was gathered in: unbiased from the first seconds on. The first
        completion only starts the clock.
        """
        if self._began is None:
            return None
        span = self._tau_s * -expm1((self._began - now) / self._tau_s)
        decay = exp((self._last - now) / self._tau_s)
        return self._weight * decay / span if span > 0 and self._presence * decay > 0.05 else None

    def seconds_for(self, amount: float, now: float) -> float | None:
        """How long until so much more has left, at the measured rate."""
        rate = self.per_s(now)
        return amount / rate if rate else None


class AdmissionPreset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of an admission, all with defaults, and how to build it. Every build is live state of its own."""

    def build(self) -> Admission:
        raise NotImplementedError(f"{type(self).__name__} has no build()")


class RoomView(Protocol):
    """What an admission may see of the room it judges for.

    busy       requests holding a permit that weigh on available endpoints
    capacity   how many the available endpoints may serve at once: the sum of their caps
    waiting    requests in line; waiting_s: the prefill seconds of all of them
    at_door    the question is a newcomer's; False: it is the head of the line's
    drain      requests that left, per second
    """

    @property
    def busy(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def waiting_s(self) -> float: ...
    @property
    def at_door(self) -> bool: ...
    @property
    def drain(self) -> DrainRate: ...
    @property
    def limits(self) -> WaitingRoom: ...

    def first(self, tenant: str) -> bool:
        """Whether a newcomer of the tenant would be the next to go in."""
        ...

    def ahead(self, tenant: str) -> float:
        """How many would go in before a newcomer of the tenant."""
        ...


class Admission(Protocol):
    """Who may enter a pool. One live object per pool; pure: its only clock is `ask.now`, its only chance `ask.rng`.

    name           as in the registry (admissions.py)
    calm           True while nobody needs to be judged as long as there is a free place: the fast path of the line
    reads_beliefs  whether it looks at belief, timeline or outlook of an EndpointLoad: elsewhere these rest
    """

    @property
    def name(self) -> str: ...

    @property
    def calm(self) -> bool: ...

    @property
    def reads_beliefs(self) -> bool: ...

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        """The verdict on a newcomer, and again on the head of the line whenever it may go in."""
        ...

    def booked(self, ask: Ask, pick: Pick) -> None:
        """It entered and its endpoint was picked."""
        ...

    def ended(self, request: Request, outcome: Outcome) -> None:
        """One that was booked is over."""
        ...

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Called about every 100 ms, and not necessarily while nothing happens."""
        ...


def capacity(candidates: Iterable[Candidate]) -> int:
    """Requests that all available endpoints together may serve at once: the sum of their concurrency caps, less what
    other gateways have there; at least an equal share of each, so that nobody is kept out by who came first."""
    total = 0
    for candidate in candidates:
        load, cap = candidate.load, candidate.endpoint.max_concurrency
        if load.available:
            others = load.others
            total += max(cap - others.in_flight, cap // (len(others.shares) + 1)) if others.shares else cap
    return total


def crowd(room: RoomView, expected_s: float | None) -> str:
    """The numbers of a room in words: the tail of most refusals."""
    told = f"{room.busy} of {room.capacity} places are taken and {room.waiting} requests wait"
    return told if expected_s is None else f"{told}; a place is expected in {expected_s:.1f} s"


def no_capacity() -> Shed:
    """Nobody is available, and nobody knows until when."""
    return Shed("no_capacity", None, "No endpoint is available.")


def full(room: RoomView, now: float) -> Shed:
    """The room's own verdict on one who may wait, when there is no chair left."""
    expected_s = room.drain.seconds_for(room.waiting + 1, now)
    return Shed("waiting_room_full", expected_s, f"The waiting room is full. {crowd(room, expected_s)}.")


def timed_out(room: RoomView, now: float) -> Shed:
    """The verdict on one who waited its full time; it is not in `room.waiting` any more."""
    expected_s = room.drain.seconds_for(room.waiting + 1, now)
    return Shed("waited_too_long", expected_s, f"No endpoint became free in time. {crowd(room, expected_s)}.")


def past_deadline(room: RoomView, needed_s: float, left_s: float, expected_s: float | None) -> Shed:
    """The verdict on one whose client will have given up before its first token: that is known, so it is told now."""
    told = f"The client gives up in {max(0.0, left_s):.1f} s and the first token is expected in {needed_s:.1f} s"
    return Shed("deadline", expected_s, f"{told}. {crowd(room, expected_s)}.")


class Cap:
    """Concurrency caps only: enter while there is a place, wait while there is a chair.

    A newcomer who by the measured drain would only wait to time out, or past its client's deadline, is refused at once:
    that is kinder and cheaper.
    """

    __slots__ = ("calm", "name", "reads_beliefs")

    def __init__(self) -> None:
        self.name = "cap"
        self.calm = True
        self.reads_beliefs = False

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        if room.busy < room.capacity and not (room.at_door and room.waiting):
            return ADMIT
        if not room.at_door:
            return Wait(room.limits.timeout_s)
        if room.capacity <= 0:
            return no_capacity()
        expected_s = room.drain.seconds_for(room.ahead(ask.request.tenant) + 1, ask.now)
        if expected_s is not None and expected_s > room.limits.timeout_s:
            told = "The wait would be longer than the waiting room allows"
            return Shed("too_slow", expected_s, f"{told}. {crowd(room, expected_s)}.")
        deadline_s = ask.request.deadline_s
        if expected_s is not None and deadline_s is not None and ask.now + expected_s > deadline_s:
            return past_deadline(room, expected_s, deadline_s - ask.now, expected_s)
        return Wait(room.limits.timeout_s)

    def booked(self, ask: Ask, pick: Pick) -> None:
        """A cap counts places, which the room does."""

    def ended(self, request: Request, outcome: Outcome) -> None:
        """A cap learns nothing."""

    def tick(self, now: float, candidates: Sequence[Candidate]) -> None:
        """A cap has no clockwork."""


class Open(Cap):
    """Everybody enters while anybody serves: for comparison, and for engines that shed by themselves."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"
        self.calm = False

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        return ADMIT if room.capacity > 0 else no_capacity()
