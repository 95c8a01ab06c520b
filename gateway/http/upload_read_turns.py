"""Turns in which connections read large uploads, so that reads do not delay other connections.

After a long read, or after a part of a request, a connection is not read again until its turn
comes. Without this, the event loop would read all bytes that the kernel has buffered for all
connections before it does anything else. A thousand clients that send single bytes would block it,
and new connections would wait for seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

LONG_READ = 64 * 1024
"""Number of bytes from which a read counts as long. Event loops read at most 256 KiB at once."""
TURNS = 4
"""Number of connections that may read again per event loop iteration after a long read."""
PIECE_TURNS = 8
"""Number of connections that may continue to read a request in pieces, per event loop iteration.

Reading these pieces takes about a third of a millisecond.
"""


class TurnReader(Protocol):
    """The interface of a connection that stops reading after a long read, until its turn comes."""

    def take_turn(self) -> None:
        """Resume reading, unless the connection has closed or is paused for other reasons."""
        ...


class ReadTurns:
    """A queue of the connections whose reading is paused until their turn comes."""

    __slots__ = ("_is_scheduled", "_loop", "_reads", "_turns", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: int = TURNS) -> None:
        """Create an empty queue, from which `turns` connections read in each loop iteration."""
        self._loop = loop
        self._turns = turns
        self._is_scheduled = False
        self._reads = 0  # number of large reads in this loop iteration
        self._waiting: deque[TurnReader] = deque()

    def wait(self, reader: TurnReader, transport: asyncio.Transport) -> bool:
        """Pause reading from `transport`, and call `reader.take_turn()` when its turn comes.

        Returns whether the data that was just read may be processed now. False means that enough
        connections were read in this iteration; process the data when the turn comes.
        """
        transport.pause_reading()
        self._waiting.append(reader)
        self._reads += 1
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)
        return self._reads <= self._turns

    def _run(self) -> None:
        self._reads = 0
        self._is_scheduled = len(self._waiting) > self._turns
        if self._is_scheduled:
            self._loop.call_soon(self._run)
        for _ in range(min(self._turns, len(self._waiting))):
            self._waiting.popleft().take_turn()
