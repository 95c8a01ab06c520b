"""Closes the connections of disconnected clients, a limited number per event loop iteration.

Closing one connection takes about 30 microseconds. Without the limit, a client that disconnects
thousands of connections at once would block the event loop for a tenth of a second.
"""

from __future__ import annotations

import asyncio
from collections import deque

CLOSES = 32
"""Maximum number of connections closed per loop iteration, which takes about a millisecond."""


class CloseQueue:
    """The connections of one event loop that wait to be closed, first come first served."""

    __slots__ = ("_closed", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Transport] = deque()
        self._closed = 0  # number of connections closed in this loop iteration

    def defer_close(self, transport: asyncio.Transport | None) -> bool:
        """Queue a connection whose client has disconnected; return whether the queue will close it.

        If not, the caller must close the connection now, for example by returning False from
        eof_received(). The queue takes no TLS connection, nor the first CLOSES of an iteration.
        """
        if transport is None or not transport.can_write_eof():
            return False
        if not self._closed:
            self._loop.call_soon(self._run)
        self._closed += 1
        if self._closed <= CLOSES and not self._waiting:
            return False
        self._waiting.append(transport)
        return True

    def _run(self) -> None:
        self._closed = min(CLOSES, len(self._waiting))
        for _ in range(self._closed):
            self._waiting.popleft().close()
        if self._closed:
            self._loop.call_soon(self._run)
