"""Limits a replay process beside a gateway: lowest priority, limited CPU time and memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

SLICE_S = 0.02
"""Seconds of CPU time after which the process pauses."""

MEMORY_BYTES = 2 << 30
"""Maximum bytes of the process's address space.

An allocation beyond it fails, and the process ends.
"""

NICE = 19

OnProgress = Callable[[float, int], None]
"""A function that is called during a replay, so that its process can pause; see
planner.replay.fleet_sim.replay()."""


def set_limits() -> None:
    """Give this process the lowest CPU priority, and limit the memory that it may allocate."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if hasattr(os, "SCHED_IDLE"):  # Linux
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


class CpuBudget:
    """Pauses this process so that it uses at most a given share of a CPU core.

    Call pause() often.
    """

    def __init__(
        self,
        share: float,
        cpu_s: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._cpu_s, self._sleep = share, cpu_s, sleep
        self._paused_at_s = 0.0  # so that the CPU time of the start counts as well

    def pause(self, _clock_s: float = 0.0, _ended: int = 0) -> None:
        """Sleep as long as needed, so that this process uses no more than its share of a CPU core.

        The CPU time since the last call counts. The arguments are ignored: they are there so that a
        replay can call this method to report its progress.
        """
        used_s = self._cpu_s() - self._paused_at_s
        if used_s >= SLICE_S:
            self._sleep(used_s * (1 - self._share) / self._share)
            self._paused_at_s = self._cpu_s()
