"""One TP group on the virtual clock: the mock's scheduler and roofline, stepped or leapt from event to event.

Who gets a request and what is measured of it are fleet.py's. What the live group does with a timer (mockgpu/group.py)
is done here with the time at which the step or the run of steps under way will be over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import inf
from operator import itemgetter

from mockgpu.blocks import BlockPool
from mockgpu.job import Job, Plan
from mockgpu.leap import MOST_STEPS, Run
from mockgpu.roofline import Roofline
from mockgpu.scheduler import Scheduler


class Engine:
    """The queue, the batch and the clock of one group. `due_s` is when `advance()` is to be called; inf while idle.

    began, ended   told of a job at its first token and at its last, with the time
    fetch          told of one whose KV comes from another group, once it has got its blocks
    leaping        False: every step by itself (for tests, and to compare)
    slow_prefill, slow_decode  factors on the times of steps with prompt tokens, and of those without
    """

    __slots__ = (
        *("_gaps", "_leaping", "_pauses", "_plan", "_preempted", "_roofline", "_run", "_since", "_thrown_out"),
        *("began", "busy_s", "due_s", "ended", "fetch", "scheduler", "slow_decode", "slow_prefill", "steps"),
    )

    def __init__(
        self,
        roofline: Roofline,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        began: Callable[[Job, float], None],
        ended: Callable[[Job, float], None],
        fetch: Callable[[Job, float], None],
        leaping: bool = True,
    ) -> None:
        self.scheduler = Scheduler(pool, max_num_seqs, max_num_batched_tokens)
        self._roofline = roofline
        self._leaping = leaping
        self.began, self.ended, self.fetch = began, ended, fetch
        self.slow_prefill = self.slow_decode = 1.0
        self.due_s = inf
        self.busy_s = 0.0
        self.steps = 0
        self._plan: Plan | None = None
        self._run: Run | None = None
        self._since = 0.0
        # Ends and durations of past steps, none longer than one before it: the longest gap of an answer is found here.
        self._gaps: list[tuple[float, float]] = []
        # Preempted jobs since when they make no tokens, and the longest such pause of those that go on.
        self._preempted = 0
        self._thrown_out: dict[Job, float] = {}
        self._pauses: dict[Job, float] = {}

    def wake(self, now: float) -> None:
        """Something new is in the queue: begin to step if idle, and cut a run short at the end of its present step."""
        if self._plan is None:
            self._begin(now)
        elif self._run is not None:
            self._cut(now)

    def advance(self, now: float) -> None:
        """The step or run that was due is over: tell of what came of it and go on with the next."""
        outcome = self.scheduler.finish(self._settled(now))
        for job in outcome.began:
            if job.made == 1:
                self._thrown_out.pop(job, None)
                self.began(job, now)
            elif job in self._thrown_out:
                self._pauses[job] = max(self._pauses.get(job, 0.0), now - self._thrown_out.pop(job))
        for job in outcome.ended:
            self.ended(job, now)
        self._begin(now)

    def abort(self, job: Job, now: float) -> None:
        """Take a job out at once; a run under way ends with its present step, for the batch is another one then."""
        if self._run is not None:
            self._cut(now)
        self.scheduler.abort(job)
        self._thrown_out.pop(job, None)
        self._pauses.pop(job, None)

    def made(self, job: Job, now: float) -> int:
        """Tokens that a decoding job has made by now."""
        run = self._run
        return self.scheduler.made(job) + (0 if run is None else run.over_at(now - self._since))

    def stop(self) -> None:
        """The group is dead: whatever was under way is gone."""
        self._plan = self._run = None
        self.due_s = inf

    def longest_gap_s(self, job: Job, since_s: float) -> float:
        """The longest time between two tokens of a job that is over and had its first one at `since_s`."""
        return max(self._longest_step_s(since_s), self._pauses.pop(job, 0.0))

    def _longest_step_s(self, since_s: float) -> float:
        first = bisect_right(self._gaps, since_s, key=itemgetter(0))
        return self._gaps[first][1] if first < len(self._gaps) else 0.0

    def _begin(self, now: float) -> None:
        plan = self._plan = self.scheduler.step()
        for job in self.scheduler.to_fetch():
            self.fetch(job, now)
        if self.scheduler.totals.preemptions != self._preempted:
            self._preempted = self.scheduler.totals.preemptions
            for job in self.scheduler.waiting:
                if job.preemptions:
                    self._thrown_out.setdefault(job, now)
        if plan is None:
            self.due_s = inf
            return
        self._since = now
        if self._leaping and not plan.chunks:
            quiet = self.scheduler.quiet(MOST_STEPS)
            if quiet:
                run = Run(self._roofline, plan.decode_seqs, plan.decode_context, quiet + 1, self.slow_decode)
                if run.steps > 1:
                    self._run = run
                    self.due_s = now + run.until(run.steps)
                    return
        slowness = self.slow_prefill if plan.chunks else self.slow_decode
        self.due_s = now + self._roofline.step_s(plan.work) * slowness

    def _cut(self, now: float) -> None:
        """Account for the steps of the run that are over; the one under way is the last, due at its own end."""
        run = self._run
        assert run is not None
        over = run.over_at(now - self._since)
        if over + 1 < run.steps:
            self.due_s = self._since + run.until(over + 1)
        self._leapt(run, over)

    def _settled(self, now: float) -> Plan:
        """The plan of the last step under way, all before it accounted for."""
        run = self._run
        if run is not None:
            self._leapt(run, run.steps - 1)
        assert self._plan is not None
        duration_s = now - self._since
        self.busy_s += duration_s
        self.steps += 1
        self._gap(now, duration_s)
        return self._plan

    def _leapt(self, run: Run, over: int) -> None:
        """That many steps of the run are over, and there is no run any more."""
        if over:
            self._plan = self.scheduler.leap(over)
            took_s = run.until(over)
            self._since += took_s
            self.busy_s += took_s
            self.steps += over
            self._gap(self._since, run.step_s(over - 1))
        self._run = None

    def _gap(self, ended_s: float, duration_s: float) -> None:
        gaps = self._gaps
        while gaps and gaps[-1][1] <= duration_s:
            gaps.pop()
        gaps.append((ended_s, duration_s))
