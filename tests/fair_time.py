"""Upper bounds that hold however busy the machine is: time as a loop sees it that nobody holds up.

Within one loop a turn counts for TURN_S at most, however long others had the processor meanwhile; a wait that is too
long counts in full, being many turns. Between processes a moment does not count in which one of them was ready to run
and others had the processor, which Linux counts. Not here: lower bounds, for which the wall clock serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

TICK_S, TURN_S = 0.002, 0.01
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
