"""One rank of a simulated engine: the mock engine's scheduler in virtual time.

An engine without data parallelism is one rank with its own clock. Data-parallel ranks in lockstep
share a clock. rank_choice.py has engines whose ranks the gateway cannot see. fleet_sim.py sends
requests and measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, JobState, Scheduler, StepPlan
from planner.replay.lockstep_clock import StepClock


class EngineMetrics(NamedTuple):
    """The metrics that a scrape of an engine returns.

    running   number of running jobs
    waiting   number of waiting jobs
    kv_usage  share of KV blocks in use, 0 to 1
    """

    running: int
    waiting: int
    kv_usage: float


class JobEvents(NamedTuple):
    """The functions that a simulated engine calls when something happens to a job.

    A job is a request's work at one engine. Each function gets the job and the current time.

    first_token       called when the job's first token has been generated
    last_token        called when the job's last token has been generated
    blocks_allocated  called when KV blocks were allocated for a job whose KV comes from another
                      group
    """

    first_token: Callable[[Job, float], None]
    last_token: Callable[[Job, float], None]
    blocks_allocated: Callable[[Job, float], None]


class ReplayEngine:
    """One data-parallel rank of a simulated engine: its queue of requests, and its running batch.

    The replay must call `advance()` at the time `due_s`, which is inf while the rank is idle.

    slow_prefill  multiplies the duration of steps with prompt tokens; 1: normal speed
    slow_decode   multiplies the duration of steps without prompt tokens; 1: normal speed
    """

    __slots__ = (
        *("_busy_before_s", "_events", "_pauses", "_preempted_at", "_preemption_count"),
        *("_steps_before", "clock", "scheduler", "slow_decode", "slow_prefill"),
    )

    def __init__(
        self,
        clock: StepClock,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        events: JobEvents,
    ) -> None:
        self.scheduler = Scheduler(pool, max_num_seqs, max_num_batched_tokens)
        self._events = events
        self.slow_prefill = self.slow_decode = 1.0
        # Preempted jobs with the time since when they generate no tokens, and the longest such
        # pause of resumed jobs.
        self._preemption_count = 0
        self._preempted_at: dict[Job, float] = {}
        self._pauses: dict[Job, float] = {}
        self.clock = clock
        self._steps_before, self._busy_before_s = clock.steps, clock.busy_s
        clock.join(self)

    @property
    def due_s(self) -> float:
        """Return when the current step or run of steps ends, in seconds; inf for an idle rank."""
        return self.clock.due_s

    @property
    def steps(self) -> int:
        return self.clock.steps - self._steps_before

    @property
    def busy_s(self) -> float:
        """Return for how many seconds the engine has computed, empty steps included."""
        return self.clock.busy_s - self._busy_before_s

    @property
    def largest_blocks(self) -> int:
        """Return the largest number of KV blocks that one request may use."""
        return self.scheduler.pool.total

    @property
    def decoding(self) -> Iterable[Job]:
        return self.scheduler.decoding

    @property
    def metrics(self) -> EngineMetrics:
        scheduler = self.scheduler
        return EngineMetrics(scheduler.running, scheduler.queued, scheduler.pool.usage)

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` block ids are cached."""
        return self.scheduler.pool.count_hits(keys, limit)

    def scheduler_of(self, job: Job) -> Scheduler:
        """Return the scheduler that has this job. This engine has only one."""
        return self.scheduler

    def add(self, job: Job, now: float) -> None:
        """Add a job to the queue. The engine reads the queue when `wake()` is called."""
        self.scheduler.add(job)

    def wake(self, now: float) -> None:
        """Let the engine read its queue soon, because a request's work (job) was added to it.

        An idle engine starts a step. A busy one ends its current run of steps after the current
        step.
        """
        self.clock.wake(now)

    def advance(self, now: float) -> None:
        """Finish the steps that are due, report their results, and begin the next step."""
        self.clock.advance(now)

    def abort(self, job: Job, now: float) -> None:
        """Remove a request's work (job) from the simulated engine at once.

        The engine's planned steps are cut short, because its batch changes.
        """
        self.clock.shorten(now)
        self.scheduler.abort(job)
        self._preempted_at.pop(job, None)
        self._pauses.pop(job, None)

    def generated_tokens(self, now: float) -> dict[Job, int]:
        """Return the number of tokens generated by `now`, for each decoding job."""
        more = self.scheduler.tick + self.clock.completed_steps(now)
        return {job: more - job.origin for job in self.scheduler.decoding}

    def stop(self) -> None:
        """Stop the engine of a group that has failed. Its current work is lost."""
        self.clock.leave(self)

    def longest_gap_s(self, job: Job, since_s: float) -> float:
        """Return the longest time between two tokens of a finished job, in seconds.

        `since_s` is the time of its first token.
        """
        return max(self.clock.longest_step_s(since_s), self._pauses.pop(job, 0.0))

    def plan_step(self, now: float) -> StepPlan | None:
        """Choose what the rank computes in its next step; None: there is nothing to compute."""
        plan = self.scheduler.step()
        for job in self.scheduler.to_fetch():
            self._events.blocks_allocated(job, now)
        if self.scheduler.totals.preemptions != self._preemption_count:
            self._preemption_count = self.scheduler.totals.preemptions
            for job in self.scheduler.waiting:
                if job.preemptions:
                    self._preempted_at.setdefault(job, now)
        return plan

    def finish_step(self, plan: StepPlan, now: float) -> None:
        """Report which jobs got their first or last token in the step that has just ended."""
        outcome = self.scheduler.finish(plan)
        for job in outcome.first_token_jobs:
            if job.generated_count == 1:
                self._preempted_at.pop(job, None)
                self._events.first_token(job, now)
            elif job in self._preempted_at:
                self._pauses[job] = max(
                    self._pauses.get(job, 0.0), now - self._preempted_at.pop(job)
                )
        for job in outcome.ended:
            self._events.last_token(job, now)

    def holds(self, job: Job) -> bool:
        """Return whether the job runs in this engine or is in its queue."""
        return job.state is not JobState.WAITING or job in self.scheduler.waiting
