"""When a refused client may come back, and that it is let in when it does: a calendar of promised work.

A Retry-After that is the same for all sends everybody back at once; one that nobody remembers makes a lottery of the
return. So promises are laid end to end along the capacity that was measured, and one who keeps to its time does not
pay the price again. One who comes sooner is told the same time. Not here: how much capacity there is, and whether
anybody is refused at all (dual.py).
"""

from __future__ import annotations

from collections import deque

import msgspec

from policies.bounds import Amount, Number, Positive
from policies.model import Ask

Key = tuple[int, int]


class ReturnTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of the calendar.

    share      of the measured capacity that is promised to those who come back
    soonest_s  nobody is asked back sooner
    latest_s   nobody is asked back later: the SDKs ignore a Retry-After above 60 s
    early_s, late_s  how far off the promised time one may come
    remembered promises at most
    """

    share: Positive = 0.45
    soonest_s: Amount = 1.0
    latest_s: Positive = 58.0
    early_s: Amount = 0.5
    late_s: Amount = 30.0
    remembered: Number = 16_384

    def __post_init__(self) -> None:
        if self.soonest_s > self.latest_s:
            raise ValueError(f"soonest_s is {self.soonest_s} and later than latest_s, {self.latest_s}")


class Calendar:
    """Promises by prompt. One owner.

    until_s  up to when the promised share of capacity is taken, laid end to end
    work_s   all work promised and not done
    """

    __slots__ = ("_order", "_promised", "_times", "until_s", "work_s")

    def __init__(self, times: ReturnTimes | None = None) -> None:
        self._times = times or ReturnTimes()
        self._promised: dict[Key, tuple[float, float]] = {}
        self._order: deque[tuple[float, Key]] = deque()
        self.until_s = self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._promised)

    def early(self, key: Key | None, now: float) -> float | None:
        """Seconds that one who was told when to come has come too soon; None for everybody else."""
        due_s = self._due(key)
        return due_s - now if due_s is not None and due_s - now > self._times.early_s else None

    def due(self, key: Key | None, now: float) -> bool:
        """Whether it was promised to be let in about now."""
        due_s = self._due(key)
        return due_s is not None and -self._times.late_s <= due_s - now <= self._times.early_s

    def kept(self, key: Key | None) -> None:
        """It was let in, or has lost its promise."""
        if key is not None:
            _, work_s = self._promised.pop(key, (0.0, 0.0))
            self.work_s = self.work_s - work_s if self._promised else 0.0

    def refuse(self, key: Key | None, work_s: float, per_s: float | None, calm_in_s: float, ask: Ask) -> float | None:
        """When to come back, seconds from now; None when no capacity has been measured.

        work_s     the request's work; per_s: work that the pool gets done per second
        calm_in_s  when the queue will have gone down to where nobody is refused
        Promises lie end to end; when the calendar is full they are scattered over its later half, up to all of the
        capacity; then there is only a time, and no promise.
        """
        if not per_s:
            return None
        times, now, rng = self._times, ask.now, ask.rng
        self.forget(now)
        begin = max(self.until_s, now + max(times.soonest_s, min(calm_in_s, 0.5 * times.latest_s)))
        length = work_s / (times.share * per_s)
        if begin + length <= now + times.latest_s:
            self.until_s = begin + length
            due_s = begin + length * rng.random()
        else:
            due_s = now + times.latest_s * (0.5 + 0.5 * rng.random())
        if key is not None and self.work_s < per_s * times.latest_s and len(self._promised) < times.remembered:
            self.kept(key)
            self._promised[key] = due_s, work_s
            self._order.append((due_s, key))
            self.work_s += work_s
        return due_s - now

    def forget(self, now: float) -> None:
        """Drop the promises that nobody came for."""
        while self._order and self._order[0][0] + self._times.late_s < now:
            due_s, key = self._order.popleft()
            if self._due(key) == due_s:
                self.kept(key)

    def _due(self, key: Key | None) -> float | None:
        promise = self._promised.get(key) if key is not None else None
        return None if promise is None else promise[0]


def identity(ask: Ask) -> Key | None:
    """What tells a request that comes again: its prompt, salted by model and cache salt.
    None when it has no fingerprint, or is too short for one whole block."""
    print_ = ask.fingerprint
    return None if print_ is None or not print_.keys else (print_.keys[-1], print_.n_bytes)
