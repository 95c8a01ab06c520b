"""The outbox: what one turn of the event loop has to write goes out together at the turn's end.

Thirty requests read in one turn are then thirty times the same Python and after it thirty sends in a row, not both in
alternation: the processor's caches stay warm, and the peer, once awake, stays awake. Together that is a tenth of the
gateway's CPU under load (docs/performance.md); when the loop is idle a write leaves a few microseconds later.
"""

from __future__ import annotations

import asyncio


class Outbox:
    """Posted writes, in order. Owned by one event loop; who closes a transport with posted bytes flushes first."""

    __slots__ = ("_posted", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: list[tuple[asyncio.Transport, bytes]] = []

    def post(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write `data` before anything that is scheduled from now on."""
        if not self._posted:
            self.loop.call_soon(self.flush)
        self._posted.append((transport, data))

    def flush(self) -> None:
        """Write everything now. Bytes for a transport that has closed meanwhile are dropped: nobody is there."""
        posted, self._posted = self._posted, []
        for transport, data in posted:
            if not transport.is_closing():
                transport.write(data)
