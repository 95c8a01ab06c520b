"""The outbox: what one turn of the event loop has to write goes out together at the turn's end.

Thirty requests read in one turn are then thirty times the same Python and after it thirty sends in a row, not both in
alternation: the processor's caches stay warm, and the peer, once awake, stays awake. Together that is a tenth of the
gateway's CPU under load (docs/performance.md); when the loop is idle a write leaves a few microseconds later.

An engine's step is a piece for each of its streams at once, and several engines may step together: hundreds of pieces,
and whoever asks for something meanwhile would wait for all of them. So a turn relays some and puts the rest off: new
requests are read, and refused or sent on, in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.relay import Relay

TURN = 32  # writes of one turn, about a millisecond
MOST = 1024  # pieces put off: who read on beyond them would take from engines what clients do not get
MOST_BYTES = 4 * 1024 * 1024  # in all of them


class Behind(Protocol):
    """An engine's connection, of which something was put off."""

    def catch_up(self, relay: Relay, data: bytes) -> None: ...


class Outbox:
    """Posted writes, in order. Owned by one event loop; who closes a transport with posted bytes flushes first.

    full  this turn has written enough: what engines say from now on is put off
    """

    __slots__ = ("_due", "_late", "_late_bytes", "_posted", "full", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.full = False
        self._due = False
        self._posted: list[tuple[asyncio.Transport, bytes]] = []
        self._late: deque[tuple[Behind, Relay, bytes]] = deque()
        self._late_bytes = 0

    def post(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write `data` before anything that is scheduled from now on."""
        if not self._due:
            self._due = True
            self.loop.call_soon(self._turn)
        self._posted.append((transport, data))
        if len(self._posted) == TURN:
            self.full = True

    def flush(self) -> None:
        """Write everything now. Bytes for a transport that has closed meanwhile are dropped: nobody is there."""
        posted, self._posted = self._posted, []
        for transport, data in posted:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except RuntimeError:  # half closed: its bytes are lost, and not those of the others
                    transport.abort()

    def put_off(self, connection: Behind, relay: Relay, data: bytes) -> None:
        """What an engine said is relayed in a later turn, after all that was put off before. Due when `full`."""
        self._late.append((connection, relay, data))
        self._late_bytes += len(data)
        while self._late_bytes > MOST_BYTES or len(self._late) > MOST:
            self._catch_up(1)
            self.full = True

    def hurry(self, connection: Behind) -> None:
        """What was put off of this connection is relayed now: it has come to its end."""
        mine = [piece for piece in self._late if piece[0] is connection]
        if mine:
            self._late = deque(piece for piece in self._late if piece[0] is not connection)
            self._late_bytes -= sum(len(data) for _, _, data in mine)
            full = self.full
            for _, relay, data in mine:
                self.full = False  # or it would be put off once more
                connection.catch_up(relay, data)
            self.full = full

    def _turn(self) -> None:
        """Whatever a write makes anybody post, or raises, finds another turn due or to be asked for."""
        if self._late:
            self._late_turn()
        else:
            self._due = self.full = False
            self.flush()

    def _late_turn(self) -> None:
        try:
            self.flush()
            self._catch_up(TURN)
        finally:
            self._due = self.full = bool(self._late)
            if self._late:
                self.loop.call_soon(self._turn)
            self.flush()

    def _catch_up(self, pieces: int) -> None:
        for _ in range(min(pieces, len(self._late))):
            connection, relay, data = self._late.popleft()
            self._late_bytes -= len(data)
            self.full = False  # or it would be put off once more
            connection.catch_up(relay, data)
