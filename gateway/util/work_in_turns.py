"""Divides long work into parts, each of which takes one turn of the event loop.

The work is a generator that yields wherever other work may run. With a thousand endpoints, planning
a configuration takes ten milliseconds; in parts, a stream waits for one part at most.

Work that needs no live objects runs in a thread. Python lets the event loop interrupt a thread that
computes only after a switch interval, which is 5 ms by default; run_in_thread() shortens it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle
from typing import TypeVar

from kvtransfer.transports.switch_interval import SWITCH_INTERVAL

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in parts: it yields where other work may run, and returns its result."""

ITEMS_PER_TURN = 128
"""Items that one part of the work handles, of which each takes a few microseconds."""


SWITCH_S = 0.0005
"""Longest time for which a thread of run_in_thread() keeps the interpreter, in seconds."""


class WorkMeter:
    """Counts handled items, to find out when a part of the work ends."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = ITEMS_PER_TURN

    def is_part_over(self, items: int = 1) -> bool:
        """Count `items` handled items; return whether the work should yield now."""
        self._left -= items
        if self._left > 0:
            return False
        self._left = ITEMS_PER_TURN
        return True


def slices(items: Sequence[T], size: int = ITEMS_PER_TURN) -> Iterator[Sequence[T]]:
    """Yield the items in slices of at most `size`."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def run_at_once(steps: Steps[T]) -> T:
    """Do work in one piece, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread, and return its result.

    While the function computes, it holds up the event loop for SWITCH_S seconds at a time at most.
    """
    SWITCH_INTERVAL.shorten(SWITCH_S)
    try:
        return await asyncio.to_thread(function)
    finally:
        SWITCH_INTERVAL.restore()


async def run_in_turns(steps: Steps[T]) -> T:
    """Do each part of the work in its own turn of the event loop; return the work's result.

    The garbage of a part is collected right after it. Python's own schedule could leave the garbage
    of all parts to one collection, which would take milliseconds.
    """
    for generation in cycle((0, 1)):
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        gc.collect(generation)
        await asyncio.sleep(0)
    raise AssertionError("cycle() has no end")
