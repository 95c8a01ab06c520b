"""Admission: enter now, wait for room, or be refused at the door with an honest Retry-After.

Lives here: the decision and the measured drain it quotes. Not here: who waits (gateway/gate.py keeps the room), what
a refusal looks like on the wire (gateway/answer.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1

import msgspec

from policies.model import Candidate


class Admit(msgspec.Struct, frozen=True):
    """There is room now."""


class Wait(msgspec.Struct, frozen=True):
    """Stand in line for at most `timeout_s`."""

    timeout_s: float


class Shed(msgspec.Struct, frozen=True):
    """Refuse. `retry_after_s` is when room is expected, None if nothing has been measured to tell."""

    reason: str
    retry_after_s: float | None


Verdict = Admit | Wait | Shed


class WaitingRoom(msgspec.Struct, frozen=True):
    """How many requests may wait for a pool, and how long each."""

    size: int = 256
    timeout_s: float = 30.0


class DrainRate:
    """Requests finished per second, recent ones weighing most (decaying with `tau_s`). Owned by one gate.

    None before the second completion and after a silence so long that nothing recent is left to measure by.
    """

    __slots__ = ("_began", "_count", "_last", "_tau_s", "_weight")

    def __init__(self, tau_s: float = 10.0) -> None:
        if tau_s <= 0:
            raise ValueError(f"tau_s is positive, not {tau_s}")
        self._tau_s = tau_s
        self._began = self._last = 0.0
        self._weight = 0.0
        self._count = 0

    def completed(self, now: float) -> None:
        """One request left at `now`, seconds on the caller's clock; never goes back."""
        if not self._count:
            self._began = now
        self._weight = self._weight * exp((self._last - now) / self._tau_s) + 1.0 if self._count else 0.0
        self._last = now
        self._count += 1

    def per_s(self, now: float) -> float | None:
        """Completions per second around `now`.

        The decayed count divided by the decayed time it was gathered in: unbiased from the first seconds on. The first
        completion only starts the clock.
        """
        span = self._tau_s * -expm1((self._began - now) / self._tau_s)
        weight = self._weight * exp((self._last - now) / self._tau_s)
        return weight / span if span > 0 and weight > 0.05 else None

    def seconds_for(self, requests: int, now: float) -> float | None:
        """How long until so many more requests have left, at the measured rate."""
        rate = self.per_s(now)
        return None if rate is None else requests / rate


def capacity(candidates: Iterable[Candidate]) -> int:
    """Requests that all available endpoints together may serve at once: the sum of their concurrency caps."""
    return sum(candidate.endpoint.max_concurrency for candidate in candidates if candidate.load.available)


def admit(in_flight: int, room_for: int, waiting: int, room: WaitingRoom, drain: DrainRate, now: float) -> Verdict:
    """The verdict on one newcomer to a pool.

    in_flight   requests of the pool holding a permit
    room_for    `capacity` of its endpoints
    waiting     requests already in line; nobody overtakes them

    A newcomer who by the measured drain would only wait to time out is refused at once: that is kinder and cheaper.
    """
    if room_for <= 0:
        return Shed("no_capacity", None)
    if not waiting and in_flight < room_for:
        return Admit()
    expected_s = drain.seconds_for(waiting + 1, now)
    if waiting >= room.size:
        return Shed("waiting_room_full", expected_s)
    if expected_s is not None and expected_s > room.timeout_s:
        return Shed("too_slow", expected_s)
    return Wait(room.timeout_s)


def timed_out(waiting: int, drain: DrainRate, now: float) -> Shed:
    """The verdict on one who waited its full time, with `waiting` others still in line."""
    return Shed("waited_too_long", drain.seconds_for(waiting + 1, now))
