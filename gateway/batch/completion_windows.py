"""Decides which batches need reserved capacity to end within their completion windows. No I/O.

A completion window is the time that the client has set for its batch, such as 24 hours. This module
measures how long the requests of a batch take; policies/admission/batch_reserve.py decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import exp

from policies.admission.batch_reserve import WindowDemand, WindowPlan, WindowPlanner

log = logging.getLogger("penstock")

TICK_S = 0.02  # between two rounds in which requests are started and interrupted
CAUTION = 4.0  # factor on the pool's mean duration for a batch of which no request has ended
SOON = 0.1  # share of the mean duration that a request still needs which already took that long
SUPPLY_TAU_S = 30.0  # time constant of the mean number of running batch requests
LOG_EVERY_S = 60.0  # between two log lines about the schedule of one batch


class Schedule(StrEnum):
    """Whether a batch is expected to end within its completion window.

    ON_TIME  yes, with the capacity that other requests leave free
    HURRIED  yes, with capacity that is reserved for it
    BEHIND   probably not, even with reserved capacity
    """

    ON_TIME = "on_time"
    HURRIED = "hurried"
    BEHIND = "behind"


class RequestTimes:
    """How long the requests of one batch take in seconds, from start to end.

    The times include the wait for a place, and the time until the runner starts the next request.
    An answer that is continued after an interruption counts with all its attempts. One that begins
    again counts with the last attempt only.
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
        """Record an attempt without a result, at the request with this index.

        `is_kept` is True if the next attempt continues its answer.
        """
        before = self._spent.pop(number, 0.0)
        if is_kept:
            self._spent[number] = before + seconds

    def add_result(self, number: int, seconds: float) -> None:
        """Record the attempt after which a request has its result."""
        before = self._spent.pop(number, 0.0)
        total_s = before + seconds + TICK_S
        self._ended_s += total_s
        self._ended += 1
        self._longest_s = max(self._longest_s, total_s)

    def estimate(
        self, backlog: int, running: Mapping[int, float], usual_s: float | None
    ) -> tuple[float, float]:
        """Estimate the remaining work of a batch.

        Returns two times in seconds: the sum over all requests without a result, and the longest of
        them.

        backlog  number of requests without a result
        running  seconds since the start of each running attempt, by the request's index
        usual_s  mean duration of the pool's requests; None: unknown. Until a request of this batch
                 has ended, its requests are expected to take CAUTION times as long. Some of them
                 then start early enough to be measured, even if the pool never has free capacity
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


class PoolSchedule:
    """The plan for all batches of one pool, so that they end within their completion windows.

    It also measures the mean number of batch requests that run at once.

    plan  the newest plan
    """

    def __init__(self) -> None:
        self.plan = WindowPlan()
        self._planner = WindowPlanner()
        self._running = self._presence = 0.0  # decaying sums
        self._seen_at = float("-inf")

    def update(
        self, demands: Sequence[WindowDemand], reserve: int, running: int, now: float
    ) -> WindowPlan:
        """Return a new plan for the batches of the pool.

        demands  what each batch still needs
        reserve  maximum number of requests that may run on reserved capacity
        running  number of batch requests that run in the pool now
        now      monotonic time in seconds
        """
        decay = exp((self._seen_at - now) / SUPPLY_TAU_S)
        self._running = decay * self._running + (1.0 - decay) * running
        self._presence = decay * self._presence + (1.0 - decay)
        self._seen_at = now
        supply = self._running / self._presence if self._presence else float(running)
        self.plan = self._planner.plan(demands, reserve, supply)
        return self.plan

    def clear(self) -> None:
        """Reserve nothing, because the pool has no batches any more."""
        self.plan = WindowPlan()

    def schedule_of(self, batch_id: str) -> Schedule:
        if batch_id in self.plan.behind:
            return Schedule.BEHIND
        return Schedule.HURRIED if batch_id in self.plan.hurried else Schedule.ON_TIME


class ScheduleLog:
    """Logs when a batch needs reserved capacity, will be late, or is on time again."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[Schedule, float]] = {}

    def update(self, demand: WindowDemand, schedule: Schedule, now: float) -> None:
        """Log the schedule of a batch if it has changed, at most every LOG_EVERY_S seconds."""
        before, at = self._logged.get(demand.id, (Schedule.ON_TIME, float("-inf")))
        if schedule is before or now - at < LOG_EVERY_S:
            return
        self._logged[demand.id] = schedule, now
        if schedule is Schedule.ON_TIME:
            log.info("batch %s is on time again", demand.id)
            return
        level, text = logging.INFO, "runs on reserved places, so that it ends in its window"
        if schedule is Schedule.BEHIND:
            level, text = logging.WARNING, "will probably not end in its completion window"
        log.log(
            level,
            "batch %s %s: about %.0f s of work on one place are left, and %.0f s of time",
            demand.id,
            text,
            demand.work_s,
            max(0.0, demand.left_s),
        )

    def keep(self, ids: Iterable[str]) -> None:
        """Forget all batches except those with these ids."""
        self._logged = {name: self._logged[name] for name in ids if name in self._logged}
