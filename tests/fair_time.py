"""Upper bounds that hold however busy the machine is: time as a loop sees it that nobody holds up.

Within one loop a turn counts for TURN_S at most, however long others had the processor meanwhile; a wait that is too
long counts in full, being many turns. Between processes a moment does not count in which one of them was ready to run
and others had the processor, which Linux counts; what a host gave to others nobody counts, so of a few tries one has to
be in time. Not here: lower bounds, for which the wall clock serves.
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
"""How long to wait for what must come and is promised for no time: a slow machine gets there, a broken test ends."""
T = TypeVar("T")


class FairTime:
    """`spent_s` so far, counted by `run`."""

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
    """Seconds since it was made, by the wall clock and as these processes and this one could use them."""

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
        """How long any of their threads have been ready to run, and did not."""
        found = 0
        for pid in self._of:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # it has just ended
                    found += int((thread / "schedstat").read_text().split()[1])
        return found / 1e9


@cache
def pace() -> float:
    """How many times longer work takes here and now than on a free core of the machine that the bounds were written on;
    1 at least. Times in a configuration that are to run out within a test, but not before what is well has answered,
    are so many times longer."""
    began = monotonic()
    sum(number * number for number in range(_WORK))
    return min(8.0, max(1.0, (monotonic() - began) / _WORK_S))


def once_within(seconds: float, took_s: Callable[[], float]) -> None:
    """One of a few tries takes no longer, and there are no more than it needs: whoever has the processor besides, or a
    host that gives it to others, holds up one of them and not all. AssertionError if all take longer."""
    spans: list[float] = []
    while not spans or spans[-1] >= seconds:
        assert len(spans) < TRIES, f"never within {seconds:g} s: {spans}"
        spans.append(took_s())


async def within(seconds: float, what: Coroutine[Any, Any, T]) -> T:
    """Its result. AssertionError if it takes longer."""
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
    """The block takes no longer. AssertionError at its end if it does."""
    time = FairTime()
    counting = asyncio.ensure_future(time.run(seconds))
    try:
        yield
    finally:
        counting.cancel()
    assert time.spent_s < seconds, f"not within {seconds:g} s"
