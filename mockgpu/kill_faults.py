"""Faults of one request's KV, and failures of the whole group at a moment of one request's life.

mockgpu/fault_grammar.py parses them and decides which requests they strike. A group creates this
object when the first such fault strikes, so that healthy groups pay nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.job import Job, StepPlan
from mockgpu.scheduler import Scheduler

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_memory import KvMemory

WATCH_S = 0.0005


class FaultTarget(Protocol):
    """The group that fails."""

    scheduler: Scheduler
    memory: KvMemory | None

    def lose_rank(self, rank: int, hang: bool = False) -> None:
        """Lose a GPU, and with it the group."""
        ...


class KillFaults:
    """Sole owner of which jobs are marked with which fault."""

    def __init__(self, victim: FaultTarget, loop: asyncio.AbstractEventLoop) -> None:
        self._target = victim
        self._loop = loop
        self._fault_by_job: dict[Job, InjectedFault] = {}

    def mark(self, job: Job, fault: InjectedFault) -> None:
        """Let this fault strike this job."""
        self._fault_by_job[job] = fault

    def forget(self, job: Job) -> None:
        """Forget a job that is over."""
        self._fault_by_job.pop(job, None)

    def on_step_planned(self, plan: StepPlan, step_s: float) -> None:
        """Schedule the group's failure in the middle of a step, for jobs that die in prefill."""
        for chunk in plan.chunks:
            if self._kind(chunk.job) is FaultKind.DIE_IN_PREFILL:
                self._loop.call_later(step_s / 2, self._target.lose_rank, 0)

    def on_step_done(self) -> None:
        """Fail the group if a job that dies while decoding has made its tokens."""
        scheduler = self._target.scheduler
        for job, fault in list(self._fault_by_job.items()):
            if fault.kind is FaultKind.DIE_MID_DECODE and scheduler.count_output(job) > fault.after:
                self._target.lose_rank(0)
                return

    def on_prompt_computed(self, job: Job) -> None:
        """Flip one bit of the prompt's KV, if the job is marked for corruption."""
        memory = self._target.memory
        if self._kind(job) is FaultKind.KV_CORRUPT and memory is not None:
            block = job.blocks[len(job.blocks) // 2]
            region = memory.regions[-1]
            region.bytes[block * region.block_bytes] ^= 1

    def loses_offer(self, job: Job) -> bool:
        """Return whether the job's KV is lost as soon as it is offered."""
        return self._kind(job) is FaultKind.KV_LOST

    def on_transfer(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        """Fail the group while the job's KV moves, as soon as `under_way` returns True.

        `under_way` returns None when the KV has already moved, too fast for a failure in between.
        """
        if self._kind(job) in (FaultKind.DIE_IN_TRANSFER, FaultKind.DIE_IN_PULL):
            self._watch(job, under_way)

    def _watch(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        is_moving = under_way(job)
        if is_moving:
            # In the next turn of the loop, because the group may be in the middle of a step.
            self._loop.call_soon(self._target.lose_rank, 0)
        elif is_moving is not None:
            self._loop.call_later(WATCH_S, self._watch, job, under_way)

    def _kind(self, job: Job) -> FaultKind | None:
        fault = self._fault_by_job.get(job)
        return None if fault is None else fault.kind
