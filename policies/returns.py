"""When a refused client may come back, and that it is let in when it does: a calendar of promised work.

A Retry-After that is the same for all sends everybody back at once; one that nobody remembers makes a lottery of the
return. So promises are laid end to end along the capacity that was measured, and one who keeps to its time does not
pay the price again. One who comes sooner is told the same time. Not here: how much capacity there is (dual.py).
"""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec

from policies.model import Ask

Key = tuple[int, int]


class ReturnTimes(msgspec.Struct, frozen=True):
    """The parameters of the calendar.

    share      of the measured capacity that is promised to those who come back
    soonest_s  nobody is asked back sooner
    latest_s   nobody is asked back later: the SDKs ignore a Retry-After above 60 s
    early_s, late_s  how far off the promised time one may come
    remembered promises at most
    """

    share: float = 0.6
    soonest_s: float = 1.0
    latest_s: float = 58.0
    early_s: float = 0.5
    late_s: float = 30.0
    remembered: int = 16_384


class Calendar:
    """Promises by prompt. One owner. `until_s`: up to when the promised share of capacity is taken."""

    __slots__ = ("_due", "_order", "_times", "until_s")

    def __init__(self, times: ReturnTimes | None = None) -> None:
        self._times = times or ReturnTimes()
        self._due: dict[Key, float] = {}
        self._order: deque[tuple[float, Key]] = deque()
        self.until_s = 0.0

    def __len__(self) -> int:
        return len(self._due)

    def early(self, key: Key | None, now: float) -> float | None:
        """Seconds that one who was told when to come has come too soon; None for everybody else."""
        due = self._due.get(key) if key is not None else None
        return due - now if due is not None and due - now > self._times.early_s else None

    def due(self, key: Key | None, now: float) -> bool:
        """Whether it was promised to be let in about now."""
        due = self._due.get(key) if key is not None else None
        return due is not None and abs(due - now) <= (self._times.early_s if due > now else self._times.late_s)

    def kept(self, key: Key | None) -> None:
        """It was let in."""
        if key is not None:
            self._due.pop(key, None)

    def refuse(
        self, key: Key | None, work_s: float, per_s: float | None, calm_in_s: float, now: float, rng: Random
    ) -> float | None:
        """When to come back, seconds from now; None when no capacity has been measured.

        work_s     the request's work; per_s: work that the pool gets done per second
        calm_in_s  when the queue will have gone down to where nobody is refused
        A promise is made if there is capacity left before the latest moment; else only a time, scattered.
        """
        if not per_s:
            return None
        times = self._times
        self.forget(now)
        begin = max(self.until_s, now + max(times.soonest_s, min(calm_in_s, 0.5 * times.latest_s)))
        length = work_s / (times.share * per_s)
        if begin + length > now + times.latest_s:
            return times.latest_s * (0.5 + 0.5 * rng.random())
        self.until_s = begin + length
        due = begin + length * rng.random()
        if key is not None and len(self._due) < times.remembered:
            self._due[key] = due
            self._order.append((due + times.late_s, key))
        return due - now

    def forget(self, now: float) -> None:
        """Drop the promises that nobody came for."""
        while self._order and self._order[0][0] < now:
            until, key = self._order.popleft()
            if self._due.get(key, now) + self._times.late_s <= until:
                del self._due[key]


def identity(ask: Ask) -> Key | None:
    """What tells a request that comes again: its prompt, salted by tenant and model. None when nobody has looked at it,
    or when it is too short for one whole block."""
    print_ = ask.fingerprint
    return None if print_ is None or not len(print_.keys) else (int(print_.keys[-1]), print_.n_bytes)
