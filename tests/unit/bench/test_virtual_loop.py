"""Unit tests of the event loop on virtual time."""

from __future__ import annotations

import asyncio
import threading
from _thread import start_new_thread
from collections.abc import Coroutine
from typing import Any

from bench.virtual_loop import VirtualLoop, wait_for_thread


def run(coroutine: Coroutine[Any, Any, bool]) -> tuple[bool, float]:
    # Return the result and the virtual time at the end.
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine), loop.time()
    finally:
        loop.close()


def test_a_thread_that_the_clock_does_not_know_is_waited_for() -> None:
    is_asked, done = threading.Event(), threading.Event()

    def work() -> None:
        is_asked.wait()
        done.set()

    def is_done() -> bool:
        was_done = done.is_set()
        is_asked.set()
        return was_done

    start_new_thread(work, ())
    assert run(wait_for_thread(is_done))[0]


def test_timers_run_while_a_thread_is_waited_for() -> None:
    async def wait() -> bool:
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, lambda: fired.append(loop.time()))
        return await wait_for_thread(lambda: fired == [2.5])

    assert run(wait()) == (True, 3.0)


def test_a_wait_without_an_end_ends_nevertheless() -> None:
    assert run(wait_for_thread(lambda: False, timeout_s=0.05)) == (False, 5.0)
