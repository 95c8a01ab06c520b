"""One TP group alive: ranks, scheduler, roofline and a clock. Jobs go in, tokens come out to sinks, step by step.

HTTP is server.py's; what a step contains and how long it takes are scheduler.py's and roofline.py's. All methods run on
the event loop; nothing here awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvtransfer.ends import End
from mockgpu.ask import ApiError
from mockgpu.blocks import BLOCK_TOKENS, BlockPool
from mockgpu.doom import Doom
from mockgpu.faults import Fault
from mockgpu.grids import roofline_for
from mockgpu.handoff.desk import Desk
from mockgpu.handoff.legs import Answering, Give, Take
from mockgpu.handoff.spec import Transfer
from mockgpu.hardware import Gpu
from mockgpu.job import Chunk, Job, Plan, State
from mockgpu.llm import Llm, kv_capacity_tokens
from mockgpu.metrics import GroupMetrics
from mockgpu.roofline import PROFILES, Profile
from mockgpu.scheduler import Scheduler

if TYPE_CHECKING:  # groups without real KV start without numpy and without kvtransfer's agents
    from mockgpu.memory import KvMemory

# A process that cannot keep up catches up by this much and forgets the rest, so that it stays responsive.
MOST_LAG_S = 0.25


class GroupSpec(msgspec.Struct, frozen=True):
    """What a TP group is made of. `kv_tokens` None: whatever memory leaves.

    `speed` 10: ten times as fast; inf: no waiting.
    `transfer`: how it hands KV over, as a prefill or decode group or both; None: it is no half of anything.
    """

    served_name: str
    model: Llm
    gpu: Gpu
    tp: int = 1
    role: str = "both"
    profile: Profile = PROFILES["2026"]
    speed: float = 1.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_tokens: int | None = None
    max_queued: int | None = None
    cached_details: bool = True
    transfer: Transfer | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV the group holds. ValueError when the weights do not fit."""
        tokens = self.kv_tokens
        if tokens is None:
            tokens = kv_capacity_tokens(self.model, self.gpu, self.tp)
        if tokens < BLOCK_TOKENS:
            raise ValueError(
                f"{self.model.name} does not fit on {self.tp} x {self.gpu.name}: no memory is left for KV"
            )
        return tokens

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return min(self.model.max_context, self.capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


class Sink(Protocol):
    """Where one job's tokens go. Called within a step; must not block."""

    def token(self) -> None:
        """The next token is there."""
        ...

    def ended(self) -> None:
        """The job's last token was the one before."""
        ...

    def failed(self, error: ApiError) -> None:
        """The engine lost the job."""
        ...


@dataclass(slots=True)
class _Live:
    """A job in the engine, its sink, and when what happened to it (loop time)."""

    sink: Sink
    arrived: float
    reason: str
    started: float | None = None
    entering: asyncio.TimerHandle | None = None


class TpGroup:
    """Sole owner of its scheduler, its ranks' health and its step timer.

    `memory` and `desk` are there once attached, in groups that hand KV over.
    """

    def __init__(self, spec: GroupSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.scheduler = Scheduler(
            BlockPool(spec.capacity_tokens // BLOCK_TOKENS),
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
        )
        self.metrics = GroupMetrics(spec.served_name)
        self.slow_prefill = self.slow_decode = 1.0
        self.hanging = False
        self._ranks_up = [True] * spec.tp
        self._roofline = roofline_for(spec.model, spec.gpu, spec.tp, spec.profile)
        self._loop = loop
        self._live: dict[Job, _Live] = {}
        self._timer: asyncio.Handle | None = None
        self._step: tuple[Plan, float] | None = None
        self._due = 0.0
        self.memory: KvMemory | None = None
        self.desk: Desk | None = None
        self._doom: Doom | None = None
        # Told when the ranks are lost (False) and when they are back (True).
        self.on_change: Callable[[bool], None] | None = None
        # Prefill legs that are computed and answer only when their KV has been taken.
        self._leaving: dict[Job, _Live] = {}

    def attach(self, memory: KvMemory) -> None:
        """Hold real KV from now on."""
        self.memory = memory
        self.scheduler.on_filled = self._write_filled
        self.scheduler.pool.log_taken()

    @property
    def dead(self) -> bool:
        """Whether a rank is lost. One is enough: every layer needs all of them."""
        return not all(self._ranks_up)

    @property
    def in_flight(self) -> int:
        """Jobs submitted and not ended."""
        return len(self._live)

    def submit(self, job: Job, sink: Sink, reason: str) -> None:
        """Take a job; `reason` is how it will have finished. ApiError 500 when dead, 503 when the queue is full."""
        starting = job.leg is not None and self.desk is None
        if starting or (self.dead and not self.hanging):
            raise _engine_dead()
        if self.spec.max_queued is not None and self._queued() >= self.spec.max_queued:
            self.metrics.rejections += 1
            if isinstance(job.leg, Take) and self.desk is not None:
                self.desk.decline(job.leg)
            raise ApiError(
                503, f"The server's queue is full ({self.spec.max_queued} requests waiting)."
            )
        live = self._live[job] = _Live(sink, self._loop.time(), reason)
        if self.desk is not None:
            self.desk.queued(job)
        delay_s = self.spec.profile.request_s / self.spec.speed
        if delay_s > 0:
            live.entering = self._loop.call_later(delay_s, self._enter, job)
        else:
            self._enter(job)

    def mark(self, job: Job, fault: Fault) -> None:
        """A fault of its KV, or of the group on its account, will befall this job."""
        if self._doom is None:
            self._doom = Doom(self, self._loop)
        self._doom.mark(job, fault)

    def abort(self, job: Job) -> None:
        """Forget a job whose client is gone; its KV is free at once. No effect on one that has ended."""
        live = self._live.pop(job, None) or self._leaving.pop(job, None)
        if self._doom is not None:
            self._doom.forget(job)
        if live is None:
            return
        if live.entering is not None:
            live.entering.cancel()
        else:
            self.scheduler.abort(job)
        self.metrics.finished["abort"] += 1
        if self.desk is not None:
            self.desk.gone(job)
        # What it held may be what the next one waits for.
        self.wake()

    def lose_rank(self, rank: int, hang: bool = False) -> None:
        """A GPU falls out: the whole group fails at once, or (`hang`) waits for it for ever and tells nobody."""
        if hang and self.dead and not self.hanging:  # who is dead already waits for nothing
            return
        self._ranks_up[rank % self.spec.tp] = False
        self.hanging = hang
        self._stop()
        if hang:
            return
        self._step = None
        self.scheduler.pool.forget()
        for job, live in [*self._live.items(), *self._leaving.items()]:
            self._drop(job, live)
            live.sink.failed(_engine_dead())
        if self.on_change is not None:
            self.on_change(False)

    def restore(self) -> None:
        """All ranks back, as after a restart; what only hung goes on with the step it was in."""
        self._ranks_up = [True] * self.spec.tp
        if self.on_change is not None and not self.hanging:
            self.on_change(True)
        self.hanging = False
        if self._step is None:
            self.wake()
        elif self._timer is None:
            self._due = self._loop.time()
            self._timer = self._loop.call_soon(self._end_step)

    def close(self) -> None:
        """Stop the clock and forget all jobs."""
        self._stop()
        for job, live in [*self._live.items(), *self._leaving.items()]:
            self._drop(job, live)

    def fail(self, job: Job, why: str) -> None:
        """One job's KV is lost: it ends with an error, as vLLM ends it whose load failure policy is `fail`."""
        live = self._live.get(job)
        if live is not None:
            self._drop(job, live)
            live.sink.failed(ApiError(500, why))

    def taken(self, job: Job, end: End) -> None:
        """The KV of a prefill leg that waited for it has gone where it should, or it will not."""
        live = self._leaving.pop(job, None)
        if live is None:
            return
        self.metrics.finished[live.reason if end.landed else "error"] += 1
        if end.landed:
            live.sink.ended()
        else:
            live.sink.failed(ApiError(500, f"KV transfer failed: {end.reason}"))

    def _queued(self) -> int:
        """Jobs waiting for the scheduler, and those on their way to it."""
        return self.scheduler.queued + sum(
            live.entering is not None for live in self._live.values()
        )

    def _drop(self, job: Job, live: _Live) -> None:
        self._live.pop(job, None)
        self._leaving.pop(job, None)
        if live.entering is not None:
            live.entering.cancel()
        else:
            self.scheduler.abort(job)
        self.metrics.finished["error"] += 1

    def _enter(self, job: Job) -> None:
        self._live[job].entering = None
        self.scheduler.add(job)
        self.wake()

    def wake(self) -> None:
        """Begin stepping if idle; in the next turn of the loop, so that requests that came together start together."""
        if self._timer is None and not self.dead:
            self._due = self._loop.time()
            self._timer = self._loop.call_soon(self._begin_step)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_step(self) -> None:
        """Plan a step and come back when it is over. Times are absolute: a late timer does not delay the next one."""
        plan = self.scheduler.step()
        if self.memory is not None:
            self._prepare(self.memory, plan)
        if plan is None:
            self._timer = None
            return
        now = self._loop.time()
        for chunk in plan.chunks:
            live = self._live[chunk.job]
            if live.started is None:
                live.started = now
                self.metrics.queue_s.observe(now - live.arrived)
        speed = self.spec.speed
        slowness = self.slow_prefill if plan.chunks else self.slow_decode
        step_s = 0.0 if speed == inf else self._roofline.step_s(plan.work) * slowness / speed
        self._due = max(self._due, now - MOST_LAG_S) + step_s
        self._step = plan, step_s
        if self._doom is not None:
            self._doom.planned(plan, step_s)
        self._timer = self._loop.call_at(self._due, self._end_step)

    def _end_step(self) -> None:
        """Hand out the step's tokens, then go on."""
        assert self._step is not None
        (plan, step_s), self._step = self._step, None
        decoding = list(self.scheduler.decoding)
        if self.memory is not None:
            self._read_back(self.memory, plan.chunks)
        outcome = self.scheduler.finish(plan)
        now, live = self._loop.time(), self._live
        self.metrics.steps += 1
        self.metrics.itl_s.observe(step_s, len(decoding))
        for job in outcome.began:
            if job.made == 1:
                self.metrics.ttft_s.observe(now - live[job].arrived)
            live[job].sink.token()
        for job in decoding:
            live[job].sink.token()
        for job in outcome.ended:
            ended = live.pop(job)
            self.metrics.e2e_s.observe(now - ended.arrived)
            if job.keep and self._hand_over(job, ended):
                continue
            self.metrics.finished[ended.reason] += 1
            ended.sink.ended()
        if self._doom is not None:
            self._doom.stepped()
        if not self.dead:
            self._begin_step()

    def _hand_over(self, job: Job, live: _Live) -> bool:
        """Offer what the job leaves; whether its answer waits until that is taken."""
        assert isinstance(job.leg, Give)
        try:
            if self.desk is None:
                raise ValueError("no agent")
            job.offered = self.desk.offer(job)
        except ValueError as error:
            # Its name is on offer already, or the engine has only just come back.
            self.scheduler.let_go(job)
            self.metrics.finished["error"] += 1
            live.sink.failed(ApiError(500, f"KV cannot be offered: {error}"))
            return True
        if self._doom is not None:
            self._doom.moving(job, self.desk.giving)
            if self._doom.loses_offer(job):
                self.desk.lose(job)
        if job.leg.answering is Answering.WHEN_TAKEN:
            self._leaving[job] = live
            return True
        return False

    def _prepare(self, memory: KvMemory, plan: Plan | None) -> None:
        """Before a step: new owners for the blocks it took, the bytes it computes, and transfers it made room for."""
        memory.renew(self.scheduler.pool.newly_taken())
        for chunk in plan.chunks if plan is not None else ():
            job = chunk.job
            if job.content is not None:
                memory.write(
                    job.blocks,
                    chunk.start,
                    job.content.states(chunk.start, chunk.start + chunk.tokens),
                )
        for job in self.scheduler.to_fetch():
            if self.desk is None:
                # The engine has only just come back. Who found everything here is in the step and goes on.
                if job.state is State.FETCHING:
                    self.fail(job, "KV load failed: the engine has no agent yet")
                    self.scheduler.let_go(job)
                continue
            self.desk.fetch(job)
            if self._doom is not None:
                self._doom.moving(job, self.desk.taking)

    def _read_back(self, memory: KvMemory, chunks: Iterable[Chunk]) -> None:
        """What a sequence says first is drawn from the KV that is really there for its prompt."""
        for chunk in chunks:
            job = chunk.job
            if (
                chunk.last
                and job.state is State.PREFILL
                and not job.made
                and job.content is not None
            ):
                taint = memory.taint(job.blocks, job.content.states(0, job.prompt_tokens))
                if taint:
                    self.metrics.tainted += 1
                    job.content.spoil(taint)
                if self._doom is not None:
                    self._doom.computed(job)

    def _write_filled(self, job: Job, index: int) -> None:
        """A block that decoding has filled gets the bytes of the answer's tokens in it; the prompt's are there."""
        if self.memory is not None and job.content is not None:
            size = self.scheduler.pool.block_tokens
            start, end = max(job.prompt_tokens, index * size), (index + 1) * size
            self.memory.write(job.blocks, start, job.content.states(start, end))


def _engine_dead() -> ApiError:
    return ApiError(
        500, "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )
