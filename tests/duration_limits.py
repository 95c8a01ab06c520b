"""Checks upper limits on durations in tests, so that they also hold on a busy machine.

- On one event loop, an iteration counts as at most TURN_S seconds. So time without CPU hardly
  counts. A wait takes many iterations, and counts in full.
- Across processes, the time in which a process was ready to run but had no CPU is subtracted.
  Linux reports it.
- Time that the host of a virtual machine takes is unknown, so one of several attempts has to meet
  the limit.

For lower limits, use the wall clock.
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
PATIENCE_S = 60.0
"""Seconds after which a wait without a required duration fails.

They are enough for slow machines, and end a broken test.
"""
T = TypeVar("T")


class FairTime:
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
    """Measures the seconds since its creation, without time in which processes waited for a CPU.

    The waiting times of this process and of the processes `pids` are subtracted from the wall time.
    """

    def __init__(self, *pids: int) -> None:
        self._of: tuple[int | str, ...] = (*pids, "self")
        self.began = monotonic()
        self._starved_s = self._starved()

    @property
    def wall_s(self) -> float:
        return monotonic() - self.began

    @property
    def starved_s(self) -> float:
        return self._starved() - self._starved_s

    @property
    def fair_s(self) -> float:
        return max(0.0, self.wall_s - self.starved_s)

    def _starved(self) -> float:
        waited_ns = 0
        for pid in self._of:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # the thread has ended
                    waited_ns += int((thread / "schedstat").read_text().split()[1])
        return waited_ns / 1e9


@cache
def pace() -> float:
    # Return how many times slower this machine is now than an idle reference machine, at least 1.
    #
    # Tests multiply a configured timeout by the result if healthy servers must answer within it.
    began = monotonic()
    sum(number * number for number in range(_WORK))
    return min(8.0, max(1.0, (monotonic() - began) / _WORK_S))


def once_within(seconds: float, took_s: Callable[[], float]) -> None:
    # Call `took_s` until it returns less than `seconds`, at most TRIES times.
    #
    # Other load delays some tries, but not all. Raises AssertionError if all take longer.
    spans: list[float] = []
    while not spans or spans[-1] >= seconds:
        assert len(spans) < TRIES, f"never within {seconds:g} s: {spans}"
        spans.append(took_s())


async def within(seconds: float, what: Coroutine[Any, Any, T]) -> T:
    # Await a coroutine and return its result. Raises AssertionError if it takes longer.
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
    # Raise AssertionError at the end of an `async with` block that took longer.
    time = FairTime()
    counting = asyncio.ensure_future(time.run(seconds))
    try:
        yield
    finally:
        counting.cancel()
    assert time.spent_s < seconds, f"not within {seconds:g} s"
