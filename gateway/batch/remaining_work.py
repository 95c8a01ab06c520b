"""Estimates how much work a batch still needs, from how long its ended requests took. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

TICK_S = 0.02  # seconds between two rounds in which requests are started and interrupted
CAUTION = 4.0  # factor on the pool's mean duration for a batch of which no request has ended
SOON = 0.1  # share of the mean duration that a request needs at least, however long it has run


class RequestTimes:
    """How long the requests of one batch take in seconds, from start to end.

    The times include the wait for a place, and the time until the runner starts the next request.
    An answer that was continued after an interruption counts with all its attempts. An answer that
    was generated again from the beginning counts with the last attempt only.
    """

    def __init__(self, known: tuple[float, float] | None = None) -> None:
        # Initialize; `known` has the mean and the longest time that an earlier owner measured.
        self._spent: dict[int, float] = {}
        self._ended_s, self._longest_s = known or (0.0, 0.0)
        self._ended = int(known is not None)

    @property
    def measured(self) -> tuple[float, float] | None:
        """Return the mean and the longest time of the ended requests; None before the first one."""
        if not self._ended:
            return None
        return round(self._ended_s / self._ended, 3), round(self._longest_s, 3)

    def add_attempt(self, number: int, seconds: float, *, is_kept: bool) -> None:
        """Record that an attempt at request `number` ended after `seconds` without a result.

        `is_kept` is True if the next attempt continues the answer of this one.
        """
        before = self._spent.pop(number, 0.0)
        if is_kept:
            self._spent[number] = before + seconds

    def add_result(self, number: int, seconds: float) -> None:
        """Record that request `number` has its result, after an attempt of `seconds` seconds."""
        before = self._spent.pop(number, 0.0)
        total_s = before + seconds + TICK_S
        self._ended_s += total_s
        self._ended += 1
        self._longest_s = max(self._longest_s, total_s)

    def estimate(
        self, backlog: int, running: Mapping[int, float], usual_s: float | None
    ) -> tuple[float, float]:
        """Estimate how long the remaining requests of a batch will take.

        Returns two times in seconds: the sum over all requests without a result, and the longest.

        backlog  number of requests without a result
        running  seconds since each running attempt began, by the request's index
        usual_s  mean duration of the pool's requests; None if unknown

        Until a request of this batch has ended, requests are expected to take CAUTION * `usual_s`.
        Some of them then start early enough to be measured, even without free capacity.
        """
        begun = self._spent | {n: self._spent.get(n, 0.0) + s for n, s in running.items()}
        longest_s = max(self._longest_s, max(begun.values(), default=0.0))
        unknown_s = max(CAUTION * (usual_s or 0.0), longest_s)
        mean_s = self._ended_s / self._ended if self._ended else unknown_s
        longest_s, least_s = max(longest_s, mean_s), SOON * mean_s
        untouched = max(0, backlog - len(begun))
        work_s = untouched * mean_s + sum(max(least_s, mean_s - s) for s in begun.values())
        if untouched or not begun:
            return work_s, longest_s
        return work_s, max(least_s, longest_s - min(begun.values()))
