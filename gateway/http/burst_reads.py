"""Reads bursts of small chunks from an engine once per millisecond.

An engine may send many chunks of one stream back to back, each with a separate write. To read and
send each chunk in its own event loop iteration costs six times as much as relaying its bytes. So
the first few chunks are relayed at once. Then the connection is not read for a millisecond, in
which the kernel collects further chunks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

BURST_GAP_S = 1e-4
"""Longest time in seconds between two reads of a burst."""
READS_BEFORE_BURST = 8
"""Number of reads in a row, each shortly after the one before, that make a burst.

An engine's first chunks often come in pairs, and the last token, its finish reason, the usage and
the end mark in a write each. They are not delayed.
"""
PAUSE_S = 1e-3
"""Seconds for which a connection is not read: the shortest timer of the event loop."""


class BurstConnection(Protocol):
    """A connection to an engine that can wait before it reads more."""

    def end_burst(self) -> None: ...


class BurstReads:
    """The connections to engines that pause reading for a millisecond to collect more chunks."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[BurstConnection, None] = {}

    def is_waiting(self, connection: BurstConnection) -> bool:
        return connection in self._waiting

    def add(self, connection: BurstConnection, transport: asyncio.Transport) -> None:
        """Stop reading from `transport`, and call the connection's end_burst() after PAUSE_S.

        If other connections wait already, this one waits only until they resume.
        """
        if not self._waiting:
            self._loop.call_later(PAUSE_S, self._end)
        self._waiting[connection] = None
        transport.pause_reading()

    def _end(self) -> None:
        try:
            while self._waiting:
                self._waiting.popitem()[0].end_burst()
        finally:
            if self._waiting:  # one connection has raised an exception
                self._loop.call_soon(self._end)
