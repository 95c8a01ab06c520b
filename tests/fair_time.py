"""Time limits that hold on a busy machine, because waiting for a CPU does not count.

Within one event loop, an iteration counts TURN_S at most, however long other processes had the CPU.
Between processes, time in which one of them was runnable without a CPU is subtracted; Linux reports
it. Time that a hypervisor gives to other guests is not visible, so one of a few attempts has to be
in time. Lower limits use the wall clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

TICK_S, TURN_S = 0.002, 0.01
TRIES = 3
_WORK, _WORK_S = 500_000, 0.04
PATIENCE_S = 20.0
"""How long to wait for an event without a deadline of its own, so that a broken test ends."""
T = TypeVar("T")


class FairTime:
    """Seconds spent by the event loop. `run` counts them."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    async def run(self, until_s: float) -> None:
        before = monotonic()
        while self.spent_s < until_s:
            await asyncio.sleep(TICK_S)
            now = monotonic()
            self.spent_s += min(now - before, TURN_S)
            before = now


class Stopwatch:
    """Seconds since its creation, as wall time and without the time its processes lacked a CPU."""

    def __init__(self, *pids: int) -> None:
        self._of: tuple[int | str, ...] = (*pids, "self")
        self.began = monotonic()
        self._starved_s = self._starved()

    @property
    def wall_s(self) -> float:
        return monotonic() - self.began

    @property
    def fair_s(self) -> float:
        return max(0.0, self.wall_s - (self._starved() - self._starved_s))

    def _starved(self) -> float:
        """Return the seconds in which threads of these processes were runnable without a CPU."""
        waiting_ns = 0
        for pid in self._of:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # the thread has just ended
                    waiting_ns += int((thread / "schedstat").read_text().split()[1])
        return waiting_ns / 1e9


@cache
def pace() -> float:
    """Return how many times longer work takes now than on the idle machine of the limits, at least
    1.

    Multiply configured timeouts by it that must expire within a test, but not before a working
    engine has answered.
    """
    began = monotonic()
    sum(number * number for number in range(_WORK))
    return min(8.0, max(1.0, (monotonic() - began) / _WORK_S))


def once_within(seconds: float, took_s: Callable[[], float]) -> None:
    """Assert that one of TRIES attempts takes less than this.

    A busy machine delays some, but not all.
    """
    spans: list[float] = []
    while not spans or spans[-1] >= seconds:
        assert len(spans) < TRIES, f"never within {seconds:g} s: {spans}"
        spans.append(took_s())


async def within(seconds: float, what: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine and return its result.

    Raises AssertionError if it takes longer than this.
    """
    waiting, time = asyncio.ensure_future(what), asyncio.ensure_future(FairTime().run(seconds))
    try:
        await asyncio.wait({waiting, time}, return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), f"not within {seconds:g} s"
        return waiting.result()
    finally:
        waiting.cancel()
        time.cancel()


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """Assert at the end of the block that it took less than this."""
    time = FairTime()
    counting = asyncio.ensure_future(time.run(seconds))
    try:
        yield
    finally:
        counting.cancel()
    assert time.spent_s < seconds, f"not within {seconds:g} s"
