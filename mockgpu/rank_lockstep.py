"""StepTimer: runs the steps of one mock engine, in which all of its ranks take part.

An engine without data parallelism has one rank. Data-parallel ranks that share experts wait for
each other in every layer, so their steps begin and end together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Protocol

from mockgpu.scheduler import StepPlan
from mockgpu.timing.layout_times import LockstepTimes
from mockgpu.timing.roofline import StepWork

# Maximum delay for which a late process makes up. It ignores any further delay, so that it stays
# responsive.
MAX_LAG_S = 0.25
_NO_WORK = StepWork()


class SteppingRank(Protocol):
    """The interface of a data-parallel rank of a mock engine, whose steps a StepTimer runs.

    slow_prefill  multiplies the duration of steps with prompt tokens; 1: normal speed
    slow_decode   multiplies the duration of steps without prompt tokens; 1: normal speed
    """

    slow_prefill: float
    slow_decode: float

    @property
    def is_dead(self) -> bool: ...

    def plan_step(self) -> StepPlan | None:
        """Plan and return the rank's next step; None: it has nothing to compute."""
        ...

    def on_step_timed(self, plan: StepPlan, step_s: float) -> None:
        """Handle the start of a planned step, which will take `step_s` seconds."""
        ...

    def finish_step(self, plan: StepPlan, step_s: float) -> None:
        """Deliver the results of the step `plan`, which has ended after `step_s` seconds."""
        ...


class StepTimer:
    """Runs the steps of an engine. All ranks of the engine begin and end each step together.

    A rank without work computes a dummy batch.

    speed  factor by which simulated time is faster than real time; inf: no waiting
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, times: LockstepTimes, speed: float) -> None:
        self._loop, self._times, self._speed = loop, times, speed
        self._ranks: list[SteppingRank] = []
        self._timer: asyncio.Handle | None = None
        self._step: tuple[list[StepPlan | None], float] | None = None
        self._due = 0.0

    def join(self, rank: SteppingRank) -> None:
        """Add a rank, which takes part in all further steps of the engine."""
        self._ranks.append(rank)

    def wake(self) -> None:
        """Start to compute steps if the engine is idle and all of its ranks are alive.

        The first step starts in the next iteration of the event loop, so that requests that arrive
        at the same time share it.
        """
        if self._timer is None and not self._is_dead:
            self._due = self._loop.time()
            self._timer = self._loop.call_soon(self._begin_step)

    def stop(self) -> None:
        """Stop the engine in the middle of its current step. `resume()` continues the step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop_step(self) -> None:
        """Discard the interrupted step of a stopped engine: its work is lost."""
        self._step = None

    def resume(self) -> None:
        """Continue a stopped engine with its interrupted step, or with the next one."""
        if self._step is None:
            self.wake()
        elif self._timer is None:
            self._due = self._loop.time()
            self._timer = self._loop.call_soon(self._end_step)

    @property
    def _is_dead(self) -> bool:
        return any(rank.is_dead for rank in self._ranks)

    def _begin_step(self) -> None:
        # Let all ranks plan a step, and schedule its end.
        #
        # End times are absolute, so that a late timer does not delay the following steps.
        plans = [rank.plan_step() for rank in self._ranks]
        if not any(plans):
            self._timer = None
            return
        step_s = self._duration_s(plans)
        self._due = max(self._due, self._loop.time() - MAX_LAG_S) + step_s
        self._step = plans, step_s
        for rank, plan in zip(self._ranks, plans, strict=True):
            if plan is not None:
                rank.on_step_timed(plan, step_s)
        self._timer = self._loop.call_at(self._due, self._end_step)

    def _duration_s(self, plans: Sequence[StepPlan | None]) -> float:
        if self._speed == inf:
            return 0.0
        has_prompts = any(plan is not None and plan.chunks for plan in plans)
        slowness = max(
            rank.slow_prefill if has_prompts else rank.slow_decode for rank in self._ranks
        )
        works = [_NO_WORK if plan is None else plan.work for plan in plans]
        return self._times.step_s(works) * slowness / self._speed

    def _end_step(self) -> None:
        assert self._step is not None
        (plans, step_s), self._step = self._step, None
        for rank, plan in zip(self._ranks, plans, strict=True):
            if plan is not None:
                rank.finish_step(plan, step_s)
        if not self._is_dead:
            self._begin_step()
