"""Scheduled returns of refused clients: when each should retry and is sure to enter.

An equal Retry-After for all would bring all clients back at once, and one without a guarantee would
make the retry a lottery. Returns are therefore scheduled one after another along the measured
capacity. A client that keeps its time does not pay the price again; one that comes earlier gets the
same time again. Capacity and refusals are in priced.py.
"""

from __future__ import annotations

from collections import deque

import msgspec

from policies.model import RoutingQuery
from policies.param_types import NonNegative, Positive, PositiveCount

Key = tuple[int, int]


class ReturnTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of the schedule.

    share      share of the measured capacity that is reserved for returning clients
    soonest_s  minimum Retry-After
    latest_s   maximum Retry-After: SDKs ignore values above 60 s
    early_s, late_s  tolerance around the scheduled time
    remembered maximum number of reservations
    """

    share: Positive = 0.45
    soonest_s: NonNegative = 1.0
    latest_s: Positive = 58.0
    early_s: NonNegative = 0.5
    late_s: NonNegative = 30.0
    remembered: PositiveCount = 16_384

    def __post_init__(self) -> None:
        if self.soonest_s > self.latest_s:
            raise ValueError(
                f"soonest_s ({self.soonest_s}) must not exceed latest_s ({self.latest_s})"
            )


class ReturnSchedule:
    """Reservations by prompt. One owner.

    scheduled_until_s  end of the reserved share of capacity, with reservations one after another
    work_s             total reserved work
    """

    __slots__ = ("_order", "_reservations", "_times", "scheduled_until_s", "work_s")

    def __init__(self, times: ReturnTimes | None = None) -> None:
        self._times = times or ReturnTimes()
        self._reservations: dict[Key, tuple[float, float]] = {}
        self._order: deque[tuple[float, Key]] = deque()
        self.scheduled_until_s = self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._reservations)

    def seconds_early(self, key: Key | None, now: float) -> float | None:
        """Return the seconds by which a scheduled request is too early.

        None if it is not early or not scheduled.
        """
        due_s = self._due_at(key)
        return due_s - now if due_s is not None and due_s - now > self._times.early_s else None

    def is_due(self, key: Key | None, now: float) -> bool:
        """Return whether this request has a reservation for about now."""
        due_s = self._due_at(key)
        return due_s is not None and -self._times.late_s <= due_s - now <= self._times.early_s

    def remove(self, key: Key | None) -> None:
        """Remove a reservation that was used or has lapsed."""
        if key is not None:
            _, work_s = self._reservations.pop(key, (0.0, 0.0))
            self.work_s = self.work_s - work_s if self._reservations else 0.0

    def schedule(
        self,
        key: Key | None,
        work_s: float,
        per_s: float | None,
        calm_in_s: float,
        query: RoutingQuery,
    ) -> float | None:
        """Schedule a refused request.

        Return its Retry-After in seconds; None if no capacity was measured.

        work_s     the request's work; per_s: work the pool completes per second
        calm_in_s  when the queue will be short enough that no request is refused

        Reservations lie end to end. When the schedule is full, times are scattered over its later
        half, up to the whole capacity; beyond that there is a time but no reservation.
        """
        if not per_s:
            return None
        times, now, rng = self._times, query.now, query.rng
        self.expire(now)
        begin = max(
            self.scheduled_until_s, now + max(times.soonest_s, min(calm_in_s, 0.5 * times.latest_s))
        )
        length = work_s / (times.share * per_s)
        if begin + length <= now + times.latest_s:
            self.scheduled_until_s = begin + length
            due_s = begin + length * rng.random()
        else:
            due_s = now + times.latest_s * (0.5 + 0.5 * rng.random())
        if (
            key is not None
            and self.work_s < per_s * times.latest_s
            and len(self._reservations) < times.remembered
        ):
            self.remove(key)
            self._reservations[key] = due_s, work_s
            self._order.append((due_s, key))
            self.work_s += work_s
        return due_s - now

    def expire(self, now: float) -> None:
        """Remove reservations whose time has passed."""
        while self._order and self._order[0][0] + self._times.late_s < now:
            due_s, key = self._order.popleft()
            if self._due_at(key) == due_s:
                self.remove(key)

    def _due_at(self, key: Key | None) -> float | None:
        reservation = self._reservations.get(key) if key is not None else None
        return None if reservation is None else reservation[0]


def request_key(query: RoutingQuery) -> Key | None:
    """Return what identifies a repeated request: its prompt, salted by model and cache salt.

    None without a fingerprint, or if the prompt is shorter than one block.
    """
    fingerprint = query.fingerprint
    return (
        None
        if fingerprint is None or not fingerprint.keys
        else (fingerprint.keys[-1], fingerprint.n_bytes)
    )
