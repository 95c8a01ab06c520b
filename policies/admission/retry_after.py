"""Schedules retries of refused clients: when each should retry, with capacity reserved for it.

If all clients got the same Retry-After, they would all return at once. Without a reservation, a
retry might be refused again. So ReturnSchedule gives each retry its own time, at the measured rate
of the pool:

- A client that retries on time is admitted before new ones.
- A client that retries too early gets the same time again.
- If the schedule is full for `latest_s`, a client should not retry at all.

If the pool becomes faster, the next retries use its additional capacity. Capacity and refusals are
in cap_admission.py and priced_admission.py.
"""

from __future__ import annotations

from collections import deque
from math import inf

import msgspec

from policies.param_types import NonNegative, Positive, PositiveCount
from policies.routing_types import RoutingQuery

Key = tuple[int, int]

SAME_RATE = 0.05
"""Relative difference (0 to 1) up to which two measured capacities count as the same.

The schedule stores one entry per different capacity, so noise must not create new ones.
"""


class ReturnTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of the schedule that tells refused clients when to retry.

    share       share of the measured capacity that is reserved for scheduled retries
    soonest_s   minimum Retry-After in seconds
    latest_s    maximum Retry-After in seconds. A client that would have to wait longer should not
                retry
    calm_s      maximum seconds by which the first retry is delayed until the queue is short
    early_s     how many seconds before its scheduled time a retry is accepted
    late_s      how many seconds after its scheduled time a retry is accepted
    remembered  maximum number of reservations
    """

    share: Positive = 0.45
    soonest_s: NonNegative = 1.0
    latest_s: Positive = 300.0
    calm_s: NonNegative = 29.0
    early_s: NonNegative = 0.5
    late_s: NonNegative = 30.0
    remembered: PositiveCount = 16_384

    def __post_init__(self) -> None:
        if self.soonest_s > self.latest_s:
            raise ValueError(
                f"soonest_s ({self.soonest_s}) must not exceed latest_s ({self.latest_s})"
            )


class ReturnSchedule:
    """Reserves capacity at later times for the retries of refused requests.

    A reservation is found by a key that is equal for equal requests (`request_key`). If several
    equal requests were refused, each has a reservation.

    scheduled_until_s  end of the last reservation, in seconds on the policy clock
    """

    # _levels  reserved work per second of the moments to come, as stairs that go down: the rate of
    #          the first pair of (end, rate) whose end is later than the moment. Adjacent rates
    #          differ by more than SAME_RATE, so there are few.
    __slots__ = ("_count", "_due", "_levels", "_order", "_times", "scheduled_until_s")

    def __init__(self, times: ReturnTimes | None = None) -> None:
        self._times = times or ReturnTimes()
        self._due: dict[Key, list[float]] = {}
        self._levels: list[tuple[float, float]] = []
        self._order: deque[tuple[float, Key]] = deque()
        self._count = 0
        self.scheduled_until_s = 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def share(self) -> float:
        """Return the share (0 to 1) of the measured capacity that is reserved for scheduled
        retries.
        """
        return self._times.share

    def seconds_early(self, key: Key | None, now: float) -> float | None:
        """Return how many seconds too early a retry comes, before its scheduled time.

        Returns None if the retry is on time, or if none was scheduled for this request. Also
        returns None for a short prompt, which cannot be recognised with certainty (`request_key`).
        """
        due = self._due.get(key) if key is not None and key[0] >= 0 else None
        return due[0] - now if due and due[0] - now > self._times.early_s else None

    def is_due(self, key: Key | None, now: float) -> bool:
        """Return whether a request that was refused before now retries at its scheduled time.

        key  identifies the request (`request_key`)
        now  time in seconds, at most early_s before or late_s after the scheduled time
        """
        times = self._times
        due = self._due.get(key) if key is not None else None
        return due is not None and any(
            -times.late_s <= due_s - now <= times.early_s for due_s in due
        )

    def remove(self, key: Key | None) -> None:
        """Remove a request's earliest reservation for a retry, because it was used or has expired.

        Does nothing if there is no reservation for `key`.
        """
        due = self._due.get(key) if key is not None else None
        if due and key is not None:
            self._count -= 1
            del due[0]
            if not due:
                del self._due[key]

    def schedule(
        self,
        key: Key | None,
        work_s: float,
        per_s: float | None,
        calm_in_s: float,
        query: RoutingQuery,
    ) -> float | None:
        """Reserve capacity for the retry of a refused request; return its Retry-After in seconds.

        The result is inf if the schedule is full until `latest_s`, and None if no capacity was
        measured. Reservations follow one another without gaps.

        key        identifies the request when it is retried; None: it gets a time but no
                   reservation
        work_s     work of the request in seconds
        per_s      seconds of work that the pool completes per second; None: unknown
        calm_in_s  seconds until the queue will be so short that no request is refused
        """
        if not per_s:
            return None
        times, now = self._times, query.now
        self.expire(now)
        soonest_s = max(times.soonest_s, min(calm_in_s, times.calm_s, times.latest_s))
        rate = times.share * per_s
        begin = max(self._full_until_s(rate), now + soonest_s)
        end, latest_s = self._end_s(begin, work_s, rate), now + times.latest_s
        if end > latest_s:
            # A request that is larger than all of an empty schedule still gets its end.
            if begin > now + soonest_s:
                return inf
            end = max(begin, latest_s)
        self._reserve(end, rate)
        self.scheduled_until_s, length = end, end - begin
        due_s = begin + length * query.rng.random()
        if key is not None and self._count < times.remembered:
            self._due.setdefault(key, []).append(due_s)
            self._order.append((due_s, key))
            self._count += 1
        return due_s - now

    def _full_until_s(self, rate: float) -> float:
        # Return the moment up to which `rate` work per second is reserved already.
        ends = (end for end, level in self._levels if level >= (1.0 - SAME_RATE) * rate)
        return max(ends, default=0.0)

    def _end_s(self, begin: float, work_s: float, rate: float) -> float:
        # Return when `work_s` ends that begins at `begin` and uses what lower levels leave of
        # `rate`.
        moment = begin
        for end, level in self._levels:
            if end > moment and level < rate:
                room_s = (end - moment) * (rate - level)
                if work_s <= room_s:
                    return moment + work_s / (rate - level)
                work_s, moment = work_s - room_s, end
        return moment + work_s / rate

    def _reserve(self, until: float, rate: float) -> None:
        # Raise the reserved work per second to `rate` up to the moment `until`.
        same = 1.0 - SAME_RATE
        higher = [item for item in self._levels if same * item[1] > rate]
        lower = [item for item in self._levels if item[1] < same * rate and item[0] > until]
        # A slow drift must not turn reservations of a high rate into ones of a low rate.
        equal = (level for _, level in self._levels if same * level <= rate <= level)
        self._levels = [*higher, (until, max(equal, default=rate)), *lower]

    def expire(self, now: float) -> None:
        """Remove the reservations whose time and tolerance have passed at `now`."""
        if self._levels and self._levels[0][0] <= now:
            self._levels = [item for item in self._levels if item[0] > now]
        while self._order and self._order[0][0] + self._times.late_s < now:
            due_s, key = self._order.popleft()
            due = self._due.get(key)
            if due and due[0] <= due_s:
                self.remove(key)


def request_key(query: RoutingQuery) -> Key | None:
    """Return a key that identifies the retry of a request: a hash of its prompt, model and cache
    salt.

    A prompt shorter than one hash block has no hash. It is identified by tenant, session and
    length. The first number of its key is negative, because other requests may have the same key.
    Returns None for a request without a fingerprint.
    """
    fingerprint, request = query.fingerprint, query.request
    if fingerprint is None:
        return None
    if fingerprint.keys:
        return fingerprint.keys[-1], fingerprint.n_bytes
    client = abs(hash((request.tenant, request.model, request.session)))
    return -1 - client, fingerprint.n_bytes
