"""Counts the Python instructions that each turn of the event loop executes.

Unlike times, the counts do not depend on the machine and its other load.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InstructionCount:
    """A counter of executed instructions; `value` is the number since it was last set to 0."""

    def __init__(self) -> None:
        self.value = 0

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "opcode":
            self.value += 1
        else:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    @contextmanager
    def running(self) -> Iterator[None]:
        # Count the instructions of functions that are called during a `with` block.
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


async def most_per_turn(action: Callable[[], Awaitable[object]]) -> int:
    # Await an action; return the largest number of instructions of one turn meanwhile.
    loop, count, turns = asyncio.get_running_loop(), InstructionCount(), list[int]()
    is_over = False

    def end_turn() -> None:
        turns.append(count.value)
        count.value = 0
        if not is_over:
            loop.call_soon(end_turn)

    end_turn()
    with count.running():
        await action()
    is_over = True
    await asyncio.sleep(0)
    return max(turns)


def most_per_step(steps: Generator[None, None, object] | Iterator[object]) -> int:
    # Run a generator to its end; return the largest number of instructions of one step.
    count, most = InstructionCount(), 0
    with count.running():
        for _ in steps:
            most, count.value = max(most, count.value), 0
    return max(most, count.value)
