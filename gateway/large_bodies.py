"""LargeBodies: turns of large request bodies, so that reading their JSON does not hold up everyone else.

Reading a body cannot be interrupted. Of most it takes a millisecond per MiB at the worst; bodies of blanks or of a
million prompts take ten times as long. Not here: how much memory bodies may take (gate.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic, thread_time

LARGE = 256 * 1024  # bytes of a body that has to wait for its turn
QUICK_S = 0.005  # CPU time that a turn may take without consequence
MOST_PAUSE_S = 5.0
PAUSE = 200.0  # a slower turn is followed by a pause of so many times as long
MAX_CLIENTS = 4096

Turn = Callable[[], Awaitable[None]]


class LargeBodies:
    """One large body at a time, in an event loop turn of its own.

    A client whose body took long to read waits before its next one, so that all of its bodies together take half a
    percent of the event loop's time.
    """

    __slots__ = ("_due", "_one_at_a_time", "_waiting")

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._due: dict[str, float] = {}
        self._waiting: dict[str, asyncio.Lock] = {}

    async def turn(self, client: str) -> None:
        """Wait for a turn. The caller reads its body before it waits for anything else."""
        if self._due.get(client, 0.0) > monotonic() or client in self._waiting:
            await self._pause(client)
        async with self._one_at_a_time:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(self._note, client, thread_time())

    async def _pause(self, client: str) -> None:
        """Wait until the client's last slow body is long ago. Bodies of one client wait one behind the other."""
        lock = self._waiting.setdefault(client, asyncio.Lock())
        async with lock:
            left_s = self._due.get(client, 0.0) - monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s + 0.001)
            asyncio.get_running_loop().call_soon(self._leave, client, lock)
            # The next one waits at least until it is known how long this body took.
            self._due[client] = monotonic() + PAUSE * QUICK_S

    def _leave(self, client: str, lock: asyncio.Lock) -> None:
        if not lock.locked() and self._waiting.get(client) is lock:
            del self._waiting[client]

    def _note(self, client: str, began: float) -> None:
        took_s = thread_time() - began
        if took_s > QUICK_S:
            if len(self._due) >= MAX_CLIENTS:
                self._due.clear()
            self._due[client] = monotonic() + min(MOST_PAUSE_S, PAUSE * took_s)
