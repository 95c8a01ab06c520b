"""One client connection, as long as it sends ordinary requests: POSTs to the line, framed by their Content-Length.

Such a request is recognised by gateway/head.py, gathered here and served in the very callback that brought its last
byte: no task, no request object. At the first byte that is anything else the connection moves to the lobby, which is
aiohttp's, with all that is unread, and never comes back: no request is ever judged by two parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from aiohttp.tcp_helpers import tcp_keepalive

from gateway.answer import GatewayError
from gateway.config import Limits
from gateway.errand import Errand, Landing, landing
from gateway.head import Head, begins_head, read_head
from gateway.lobby import Lobby
from gateway.outbox import Outbox
from gateway.talk import BODY, CLOSING, HEAD, IDLE, SERVING, Serve, Talk

MAX_AHEAD = 64 * 1024  # bytes of further requests that may lie here while one is served; more stays in the socket
MAX_READS = 16  # reads that a head may take; who drips it is for the lobby


class Front(Talk, asyncio.Protocol):
    """A client connection: one request after the other, each to the last byte of its answer.

    _ahead   what came and belongs to no request yet
    _head    the newest head: the next one mostly differs in its length alone
    headers  of the request being served, which the line asks for
    _pieces  the body of the request being served, as it came; `_missing` bytes of it are still to come
    """

    __slots__ = (
        *("_ahead", "_body_bytes", "_errand", "_fronts", "_gone", "_head", "_hold", "_landing", "_limits", "_lobby"),
        *("_missing", "_must_close", "_outbox", "_pieces", "_pumping", "_reading_paused", "_reads", "_serve"),
        *("_source", "address", "headers", "paused_at", "phase", "since", "transport"),
    )

    def __init__(
        self, serve: Serve, fronts: set[Talk], limits: Limits, outbox: Outbox, lobby: Callable[[], Lobby]
    ) -> None:
        self._set_up(serve, fronts, limits, outbox)
        self._lobby = lobby
        self._head: Head | None = None
        self.headers: Mapping[str, str] = {}
        self._errand: Errand | None = None
        self._landing: Landing | None = None
        self._hold: Callable[[int], None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._ahead = b""
        self._pieces: list[bytes] = []
        self._body_bytes = self._missing = self._reads = 0
        self._pumping = self._reading_paused = False
        self.transport: asyncio.Transport | None = None

    # What the line sees of a client, besides what Talk has

    def body_at_hand(self) -> bytes:
        """The body, if it came with its head."""
        return b"" if self._missing else self._pieces.pop()

    async def body(self, hold: Callable[[int], None]) -> bytes:
        """The request's body, whole. Raises GatewayError when it is refused: too slow, or `hold` has no room for it.

        `hold` is told how many bytes have come so far, not how many were announced: announcing is free.
        """
        if self._missing:
            hold(self._body_bytes - self._missing)
            self._hold, self._landing = hold, landing(self._outbox.loop)
            self._enter(BODY)
            if self._ahead:  # the rest came before anybody asked for it
                self._gather(self._ahead)
            try:
                await self._landing
            finally:
                self._hold = self._landing = None
            self.phase = SERVING
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # The connection's life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop sets TCP_NODELAY on every TCP transport
        tcp_keepalive(self.transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._enter(IDLE)
        self._fronts.add(self)
        if len(self._fronts) > self._limits.connections:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._ahead = b""
        self._fronts.discard(self)
        if self._errand is not None:
            self._errand.cancel()
        if self._gone is not None:
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._pause_source()

    def resume_writing(self) -> None:
        self._resume_source()
        if self._errand is None and self.phase is SERVING:  # the next request waited for its answer to be read
            self._rest()

    def data_received(self, data: bytes) -> None:
        phase, head = self.phase, self._head
        if phase is IDLE and head is not None and (extent := head.extent(data, 0)) is not None:
            start, end = extent
            if end == len(data) and end - start <= self._limits.body:  # what nearly always comes: one request, whole
                self._begin(head, data[start:], end - start)
                return
        if phase is BODY:
            self._gather(data)
        elif phase is not CLOSING:
            self._ahead = self._ahead + data if self._ahead else data
            if phase is not SERVING:
                self._pump()
            elif len(self._ahead) > MAX_AHEAD and self.transport is not None:
                self._reading_paused = True
                self.transport.pause_reading()

    def eof_received(self) -> None:
        """A client that closes its sending side has left: the transport closes itself after this."""

    # From request to request

    def _pump(self) -> None:
        """Serve what has come, one request after the other, until one of them has to wait."""
        data, self._ahead, at = self._ahead, b"", 0
        self._pumping = True
        while at < len(data) and (self.phase is IDLE or self.phase is HEAD):
            head = self._head
            extent = None if head is None else head.extent(data, at)
            if head is None or extent is None:
                head = self._head = read_head(data, at)
                extent = None if head is None else head.extent(data, at)
            if head is None or extent is None or extent[1] - extent[0] > self._limits.body:
                break
            start, at = extent
            self._begin(head, data[start:at], at - start)
            if at < len(data):
                self._outbox.flush()  # so that answers nobody reads are noticed before there are more of them
        self._pumping = False
        if at < len(data):
            self._keep(data[at:])

    def _keep(self, data: bytes) -> None:
        """What is no request yet, or not one whose turn it is: it waits here, or goes to the lobby."""
        if self.phase is SERVING:
            self._ahead = data
        elif self.phase is not CLOSING and self.transport is not None:
            if self._reads < MAX_READS and begins_head(data):
                self._ahead = data
                self._reads += 1
                if self.phase is IDLE:
                    self._enter(HEAD)
            else:
                self._move(self.transport, data)

    def _begin(self, head: Head, body: bytes, length: int) -> None:
        self._pieces = [body]
        self._body_bytes = length
        self._missing = length - len(body)
        self._reads = 0
        self.phase = SERVING
        self.headers = head.headers
        errand = self._errand = Errand(self._serve(self, head.api), self._served)
        errand.step()

    def _served(self) -> None:
        """The request is over: the connection closes, or waits for the next one, which may be here already."""
        self._errand = None
        if self.transport is None:
            return
        if self._must_close or self._missing:
            self._close_gently()
        elif self.paused_at is None:  # otherwise answers that nobody reads would pile up behind one another
            self._rest()

    def _rest(self) -> None:
        self._enter(IDLE)
        if self._reading_paused and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()
        if self._ahead and not self._pumping:
            self._pump()

    def _move(self, transport: asyncio.Transport, data: bytes) -> None:
        """To the lobby, with everything that was not served."""
        self.transport = None
        self._fronts.discard(self)
        self._ahead, self._head = b"", None
        lobby = self._lobby()
        transport.set_protocol(lobby)
        lobby.connection_made(transport)
        if self.paused_at is not None:  # transports tell of a change alone, and this one has told it already
            lobby.pause_writing()
            lobby.paused_at = self.paused_at
        lobby.take_over(data, self.since if self.phase is HEAD else None)

    # Bodies that come in pieces

    def _gather(self, data: bytes) -> None:
        if self._landing is None or self._hold is None:
            return
        piece = data[: self._missing]
        self._ahead = data[len(piece) :]
        self._pieces.append(piece)
        self._missing -= len(piece)
        try:
            self._hold(self._arrived)
        except GatewayError as error:
            self._landing.land(error)
            return
        if not self._missing:
            self._landing.land()

    @property
    def _silent(self) -> bool:
        return self._head is None

    @property
    def _arrived(self) -> int:
        return self._body_bytes - self._missing

    @property
    def _body_left(self) -> bool:
        return self._missing > 0

    def _fail_body(self, error: GatewayError) -> None:
        if self._landing is not None:
            self._landing.land(error)

    # Closing

    def _end(self) -> None:
        if self.transport is not None:
            self._outbox.flush()
            self._enter(CLOSING)
            self.transport.close()

    def _close_gently(self) -> None:
        if self._missing or self._reading_paused:
            self._linger()
        else:
            self._end()

    def finish(self) -> asyncio.Future[None]:
        """The gateway stops: close now, or after the answer under way. The future is done when nobody is connected."""
        self._gone = self._outbox.loop.create_future()
        self._must_close = True
        if self._errand is None:
            self._end()
        return self._gone
