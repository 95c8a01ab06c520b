"""Injects faults into one job of a mock engine: its KV is damaged or lost, or the engine dies.

mockgpu/fault_grammar.py parses these faults; error responses and broken answers are in
mockgpu/http. An engine creates the object KillFaults only when the first such fault occurs, so that
healthy engines pay nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.scheduler import Job, Scheduler, StepPlan

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_bytes import KvMemory

WATCH_S = 0.0005


class FaultTarget(Protocol):
    """The attributes and methods of a mock engine that KillFaults uses to inject a fault."""

    scheduler: Scheduler
    memory: KvMemory | None

    def fail_rank(self, rank: int, hang: bool = False) -> None:
        """Simulate the loss of a GPU, which stops the whole mock engine."""
        ...


class KillFaults:
    """Injects a fault into single jobs of one mock engine when the job reaches a certain point.

    That point is a step, the end of its prompt, the offer of its KV to another engine, or a KV
    transfer. A job has at most one fault.
    """

    def __init__(self, target: FaultTarget, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop
        self._fault_by_job: dict[Job, InjectedFault] = {}

    def mark(self, job: Job, fault: InjectedFault) -> None:
        self._fault_by_job[job] = fault

    def forget(self, job: Job) -> None:
        self._fault_by_job.pop(job, None)

    def on_step_planned(self, plan: StepPlan, step_s: float) -> None:
        """Let the engine die in the middle of this step, if it prefills a job with that fault."""
        for chunk in plan.chunks:
            if self._kind(chunk.job) is FaultKind.DIE_IN_PREFILL:
                self._loop.call_later(step_s / 2, self._target.fail_rank, 0)

    def on_step_done(self) -> None:
        """Let the engine die if a job with that fault has decoded enough tokens."""
        scheduler = self._target.scheduler
        for job, fault in list(self._fault_by_job.items()):
            if fault.kind is FaultKind.DIE_MID_DECODE and scheduler.count_output(job) > fault.after:
                self._target.fail_rank(0)
                return

    def on_prompt_computed(self, job: Job) -> None:
        """Flip one bit of the prompt's KV, if the job has the fault that corrupts KV."""
        memory = self._target.memory
        if self._kind(job) is FaultKind.KV_CORRUPT and memory is not None:
            block = job.blocks[len(job.blocks) // 2]
            region = memory.regions[-1]
            region.bytes[block * region.block_bytes] ^= 1

    def loses_offer(self, job: Job) -> bool:
        """Return whether this job's KV must disappear once another engine may fetch it."""
        return self._kind(job) is FaultKind.KV_LOST

    def on_transfer(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        """Let the engine die while this job's KV is being transferred, if the job has that fault.

        `under_way()` is polled. It returns False before the transfer, True during it, and None
        after it. A transfer that begins and ends between two polls does not stop the engine.
        """
        if self._kind(job) in (FaultKind.DIE_IN_TRANSFER, FaultKind.DIE_IN_PULL):
            self._watch(job, under_way)

    def _watch(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        is_moving = under_way(job)
        if is_moving:
            # Do this in the next iteration of the event loop: the group may be amid a step now.
            self._loop.call_soon(self._target.fail_rank, 0)
        elif is_moving is not None:
            self._loop.call_later(WATCH_S, self._watch, job, under_way)

    def _kind(self, job: Job) -> FaultKind | None:
        fault = self._fault_by_job.get(job)
        return None if fault is None else fault.kind
