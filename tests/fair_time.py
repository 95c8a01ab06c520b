"""Upper bounds that hold however busy the machine is: time as a loop sees it that nobody holds up.

A turn of the loop counts for TURN_S at most, however long others had the processor meanwhile. A wait that is too long
counts in full, being many turns. Not here: lower bounds, for which the wall clock serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
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
