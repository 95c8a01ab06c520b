"""StepClock: computes when the steps of one simulated engine end, in all ranks of the engine.

A TP group is one rank; data-parallel ranks in lockstep are several. The live mock engine has
mockgpu/rank_lockstep.py instead, which waits with a timer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from operator import itemgetter
from typing import Protocol

from mockgpu.scheduler import Scheduler, StepPlan
from mockgpu.timing.decode_run import MOST_STEPS, DecodeRun, most_steps
from mockgpu.timing.layout_times import LockstepTimes
from mockgpu.timing.roofline import StepWork

_NO_WORK = StepWork()

Plans = list[StepPlan | None]


class ClockedRank(Protocol):
    """The methods of a data-parallel rank that the step clock of its simulated engine calls.

    The ranks' steps begin and end together, so one clock (StepClock) computes them.

    slow_prefill  multiplies the duration of steps with prompt tokens; 1: normal speed
    slow_decode   multiplies the duration of steps without prompt tokens; 1: normal speed
    """

    scheduler: Scheduler
    slow_prefill: float
    slow_decode: float

    def plan_step(self, now: float) -> StepPlan | None:
        """Plan and return the rank's next step; None: it has nothing to compute."""
        ...

    def finish_step(self, plan: StepPlan, now: float) -> None:
        """Deliver the results of a step that has just ended."""
        ...


class StepClock:
    """The clock of one simulated engine: it plans the engine's next step, or run of decode steps.

    That ends at `due_s`, in virtual time.

    merges_steps  False: every step is simulated separately (for tests and comparison)
    """

    __slots__ = (
        *("_gaps", "_merges_steps", "_plans", "_ranks", "_run", "_since", "_times"),
        *("busy_s", "due_s", "steps"),
    )

    def __init__(self, times: LockstepTimes, merges_steps: bool = True) -> None:
        self._times, self._merges_steps = times, merges_steps
        self._ranks: list[ClockedRank] = []
        self._plans: Plans | None = None
        self._run: DecodeRun | None = None
        self._since = 0.0
        self.due_s = inf
        self.busy_s = 0.0
        self.steps = 0
        # Ends and durations of past steps, in decreasing duration: the longest gap of an answer is
        # found here.
        self._gaps: list[tuple[float, float]] = []

    def join(self, rank: ClockedRank) -> None:
        """Add a rank, which takes part in all further steps of the simulated engine."""
        self._ranks.append(rank)

    def leave(self, rank: ClockedRank) -> None:
        """Remove a rank that has failed, discard the current step, and stop the clock."""
        if rank in self._ranks:
            self._ranks.remove(rank)
        self._plans = self._run = None
        self.due_s = inf

    def wake(self, now: float) -> None:
        """Let the engine read its queue, because a job was added.

        An idle engine starts a step. A busy one ends its current run of steps after the current
        step.
        """
        if self._plans is None:
            self._begin(now)
        else:
            self.shorten(now)

    def advance(self, now: float) -> None:
        """Finish the steps that are due, deliver their results, and begin the next step."""
        for rank, plan in zip(self._ranks, self._finish_steps(now), strict=True):
            if plan is not None:
                rank.finish_step(plan, now)
        self._begin(now)

    def shorten(self, now: float) -> None:
        """End the planned run of decode steps after its current step: a batch has changed."""
        run = self._run
        if run is None:
            return
        finished = run.completed_by(now - self._since)
        if finished + 1 < run.steps:
            self.due_s = self._since + run.end_of(finished + 1)
        self._account_run(run, finished)

    def completed_steps(self, now: float) -> int:
        """Return the number of steps of the current run of decode steps that have ended by `now`.

        The ranks' schedulers learn of these steps only when the run ends.
        """
        return 0 if self._run is None else self._run.completed_by(now - self._since)

    def longest_step_s(self, since_s: float) -> float:
        """Return the duration in seconds of the longest engine step that ended after `since_s`."""
        first = bisect_right(self._gaps, since_s, key=itemgetter(0))
        return self._gaps[first][1] if first < len(self._gaps) else 0.0

    def _begin(self, now: float) -> None:
        plans = [rank.plan_step(now) for rank in self._ranks]
        if not any(plans):
            self._plans, self.due_s = None, inf
            return
        self._plans, self._since = plans, now
        if self._merges_steps and not any(plan.chunks for plan in plans if plan is not None):
            steps = self._decode_only_steps(plans)
            if steps > 1:
                run = self._run = DecodeRun(lambda step: self._step_s(plans, step), steps)
                self.due_s = now + run.end_of(steps)
                return
        self.due_s = now + self._step_s(plans)

    def _decode_only_steps(self, plans: Plans) -> int:
        # Return how many steps, the planned one included, only decode on every rank.
        least = MOST_STEPS + 1
        for rank, plan in zip(self._ranks, plans, strict=True):
            if plan is not None:
                least = rank.scheduler.decode_only_steps(least - 1) + 1
                least = most_steps(plan.decode_seqs, plan.decode_context, least)
        return least

    def _step_s(self, plans: Plans, step: int = 0) -> float:
        # Return the duration of a step that comes `step` decode-only steps after the planned one.
        if len(plans) == 1:  # nearly all engines have one rank, and every step calls this function
            (plan,), (rank,) = plans, self._ranks
            assert plan is not None
            slowness = rank.slow_prefill if plan.chunks else rank.slow_decode
            return self._times.step_s((_work(plan, step),)) * slowness
        works = [_NO_WORK if plan is None else _work(plan, step) for plan in plans]
        has_prompts = any(work.prefill_tokens for work in works)
        slowness = max(
            rank.slow_prefill if has_prompts else rank.slow_decode for rank in self._ranks
        )
        return self._times.step_s(works) * slowness

    def _finish_steps(self, now: float) -> Sequence[StepPlan | None]:
        # Count all steps of the run before its last one, and return the plans of the last one.
        run = self._run
        if run is not None:
            self._account_run(run, run.steps - 1)
        assert self._plans is not None
        self._account(now, now - self._since, 1)
        return self._plans

    def _account_run(self, run: DecodeRun, steps: int) -> None:
        if steps:
            assert self._plans is not None
            self._plans = [
                None if plan is None else rank.scheduler.advance(steps)
                for rank, plan in zip(self._ranks, self._plans, strict=True)
            ]
            self._since += run.end_of(steps)
            self.busy_s += run.end_of(steps) - run.step_s(steps - 1)
            self._account(self._since, run.step_s(steps - 1), steps)
        self._run = None

    def _account(self, ended_s: float, duration_s: float, steps: int) -> None:
        self.busy_s += duration_s
        self.steps += steps
        gaps = self._gaps
        while gaps and gaps[-1][1] <= duration_s:
            gaps.pop()
        gaps.append((ended_s, duration_s))


def _work(plan: StepPlan, step: int) -> StepWork:
    if not step:
        return plan.work
    return StepWork(0, 0.0, plan.decode_seqs, plan.decode_context + step * plan.decode_seqs)
