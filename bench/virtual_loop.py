"""An event loop on virtual time: its clock jumps to the next timer when there is nothing to do."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

THREAD_WAIT_S = 0.001
UNKNOWN_THREAD_WAIT_S = 0.01


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time: its clock advances only while no callback is ready.

    The clock stands still while callbacks or threads run, and while bytes are on their way between
    sockets of this process. Otherwise it jumps to the next timer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self._began = 0.0, 1_750_000_000.0
        self._calls = 0  # number of calls that run in threads now
        self._look = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def wall_time(self) -> float:
        """Return the virtual time as seconds since the Unix epoch."""
        return self._began + self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        self._calls += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._end_call)
        return future

    def _end_call(self, _: asyncio.Future[Any]) -> None:
        self._calls -= 1

    def _select(self, timeout: float | None) -> Any:
        events = self._look(0)
        if events or timeout == 0:
            return events
        os.sched_yield()
        events = self._look(0)
        while not events and (self._calls or timeout is None):
            events = self._look(THREAD_WAIT_S)
        if not events and timeout is not None:
            self._now += timeout
        return events


async def wait_for_thread(is_done: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait on virtual time until a real thread has made `is_done()` true.

    The virtual clock cannot see the thread's work. So between two checks, the thread gets some
    milliseconds of real time, and timers one second of virtual time. Returns False if `is_done()`
    is false after `timeout_s` seconds of real time.
    """
    pause, loop = threading.Event(), asyncio.get_running_loop()
    for _ in range(int(timeout_s / UNKNOWN_THREAD_WAIT_S)):
        if is_done():
            return True
        await loop.run_in_executor(None, pause.wait, UNKNOWN_THREAD_WAIT_S)
        await asyncio.sleep(1.0)
    return is_done()
