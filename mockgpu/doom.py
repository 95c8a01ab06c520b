"""Faults of one request's KV, and deaths of the whole group at a chosen moment of one request's life.

What can be asked for, and with what chance, is faults.py's; here is carried out what was asked, at its moment. A group
makes a Doom when the first such fault strikes, so that healthy groups pay nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mockgpu.faults import Fault, FaultKind
from mockgpu.job import Job, Plan
from mockgpu.scheduler import Scheduler

if TYPE_CHECKING:  # groups without real KV start without numpy and without kvtransfer's agents
    from mockgpu.memory import KvMemory

WATCH_S = 0.0005


class Victim(Protocol):
    """The group that dies."""

    scheduler: Scheduler
    memory: KvMemory | None

    def lose_rank(self, rank: int, hang: bool = False) -> None:
        """A GPU falls out, and the group with it."""
        ...


class Doom:
    """Sole owner of which jobs are marked, and with what."""

    def __init__(self, victim: Victim, loop: asyncio.AbstractEventLoop) -> None:
        self._victim = victim
        self._loop = loop
        self._marked: dict[Job, Fault] = {}

    def mark(self, job: Job, fault: Fault) -> None:
        """This fault will befall this job."""
        self._marked[job] = fault

    def forget(self, job: Job) -> None:
        """The job is over."""
        self._marked.pop(job, None)

    def planned(self, plan: Plan, step_s: float) -> None:
        """A step begins: who is to die in prefill dies in the middle of one."""
        for chunk in plan.chunks:
            if self._kind(chunk.job) is FaultKind.DIE_IN_PREFILL:
                self._loop.call_later(step_s / 2, self._victim.lose_rank, 0)

    def stepped(self) -> None:
        """A step is over: who is to die while decoding has made its tokens."""
        scheduler = self._victim.scheduler
        for job, fault in list(self._marked.items()):
            if fault.kind is FaultKind.DIE_MID_DECODE and scheduler.made(job) > fault.after:
                self._victim.lose_rank(0)
                return

    def computed(self, job: Job) -> None:
        """The prompt's KV is there, and nobody has seen it yet: one bit of it may turn."""
        memory = self._victim.memory
        if self._kind(job) is FaultKind.KV_CORRUPT and memory is not None:
            block = job.blocks[len(job.blocks) // 2]
            region = memory.regions[-1]
            region.bytes[block * region.block_bytes] ^= 1

    def loses_offer(self, job: Job) -> bool:
        """Whether its KV is lost as soon as it is on offer."""
        return self._kind(job) is FaultKind.KV_LOST

    def moving(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        """The job's KV is offered or asked for: who is to die while it moves dies when `under_way` says so.

        None: it has moved, too fast for dying in the middle.
        """
        if self._kind(job) in (FaultKind.DIE_IN_TRANSFER, FaultKind.DIE_IN_PULL):
            self._watch(job, under_way)

    def _watch(self, job: Job, under_way: Callable[[Job], bool | None]) -> None:
        now = under_way(job)
        if now:
            # In the next turn: the group may be in the middle of beginning or ending a step.
            self._loop.call_soon(self._victim.lose_rank, 0)
        elif now is not None:
            self._loop.call_later(WATCH_S, self._watch, job, under_way)

    def _kind(self, job: Job) -> FaultKind | None:
        fault = self._marked.get(job)
        return None if fault is None else fault.kind
