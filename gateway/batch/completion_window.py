"""Whether the batches of a pool will end within their completion windows: on time, hurried, behind.

A completion window is the time that the client has set for its batch, such as 24 hours. This module
keeps and logs the state of each batch. policies/admission/batch_reserve.py decides it, from the
work that remaining_work.py estimates. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import exp

from policies.admission.batch_reserve import WindowDemand, WindowPlan, WindowPlanner

log = logging.getLogger("penstock")

SUPPLY_TAU_S = 30.0  # time constant of the mean number of running batch requests
LOG_EVERY_S = 60.0  # seconds between two log lines about the schedule of one batch


class Schedule(StrEnum):
    """Whether a batch is expected to end within its completion window.

    ON_TIME  yes, with the capacity that other requests leave free
    HURRIED  yes, with capacity that is reserved for the batch
    BEHIND   probably not, even with reserved capacity
    """

    ON_TIME = "on_time"
    HURRIED = "hurried"
    BEHIND = "behind"


class PoolSchedule:
    """The plan for all batches of one pool, so that they end within their completion windows.

    It also measures the mean number of batch requests that run at once.

    plan  the newest plan
    """

    def __init__(self) -> None:
        self.plan = WindowPlan()
        self._planner = WindowPlanner()
        # Decaying sums of running requests, and of the weights of the samples.
        self._running = self._presence = 0.0
        self._seen_at = float("-inf")

    def update(
        self, demands: Sequence[WindowDemand], reserve: int, running: int, now: float
    ) -> WindowPlan:
        """Plan how the batches of a pool share its capacity, and return the plan.

        demands  what each batch still needs before its completion window ends
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
        """Release all capacity reserved for batches, because the pool has no batches any more."""
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
            "batch %s %s: its remaining requests take about %.0f s one by one, and %.0f s are left",
            demand.id,
            text,
            demand.work_s,
            max(0.0, demand.left_s),
        )

    def keep(self, ids: Iterable[str]) -> None:
        """Forget the last logged state of all batches except those with the given ids."""
        self._logged = {name: self._logged[name] for name in ids if name in self._logged}
