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

from gateway.answer import GatewayError, new_id
from gateway.config import Limits
from gateway.connections import ClientConnections, unread_too_large
from gateway.errand import Errand, Landing, landing
from gateway.head import Head, continues_head, is_unfinished, read_head
from gateway.large_bodies import LARGE, Turn
from gateway.lobby import Lobby
from gateway.outbox import Outbox
from gateway.talk import BODY, CLOSING, HEAD, IDLE, SERVING, Serve, Talk, add_piece

MAX_AHEAD = 64 * 1024  # bytes of further requests that may lie here while one is served; more stays in the socket


class Front(Talk, asyncio.Protocol):
    """A client connection: one request after the other, each to the last byte of its answer.

    _ahead   what came and belongs to no request yet, from the place `_at` on
    _due     the request at the front of it gets its turn in the next turn of the event loop
    _in_kernel  bytes of it that the kernel may keep, while reading is paused
    _head    the newest head: the next one mostly differs in its length alone
    headers  of the request being served, which the line asks for
    _pieces  the body of the request being served, as it came; `_missing` bytes of it are still to come
    """

    __slots__ = (
        *("_ahead", "_at", "_body_bytes", "_counted", "_due", "_errand", "_fronts", "_gone", "_head", "_hold"),
        *(
            "_in_kernel",
            "_landing",
            "_limits",
            "_lobby",
            "_missing",
            "_must_close",
            "_outbox",
            "_pieces",
            "_reading_paused",
        ),
        *(
            "_serve",
            "_source",
            "address",
            "closes",
            "headers",
            "is_draining",
            "paused_at",
            "phase",
            "since",
            "transport",
        ),
    )

    def __init__(
        self, serve: Serve, fronts: ClientConnections, limits: Limits, outbox: Outbox, lobby: Callable[[], Lobby]
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
        self._at = self._body_bytes = self._counted = self._in_kernel = self._missing = 0
        self._due = self._reading_paused = False
        self.transport: asyncio.Transport | None = None

    # What the line sees of a client, besides what Talk has

    def body_at_hand(self) -> bytes:
        """The body, if it came with its head."""
        return b"" if self._missing else self._pieces.pop()

    async def body(self, hold: Callable[[int], None], turn: Turn | None = None) -> bytes:
        """The request's body, whole. Raises GatewayError when it is refused: too slow, or `hold` has no room for it.

        `hold` is told how many bytes have come so far, not how many were announced: announcing is free. A large body
        is joined after `turn`.
        """
        if self._missing:
            hold(self._body_bytes - self._missing)
            self._hold, self._landing = hold, landing(self._outbox.loop)
            self._enter(BODY)
            if self._ahead:  # the rest came before it was asked for
                rest, self._ahead, self._at = self._ahead[self._at :], b"", 0
                self._gather(rest)
            try:
                await self._landing
                self.phase = SERVING
                if turn is not None and self._body_bytes >= LARGE:
                    await turn()
            except BaseException:
                self._pieces = []  # the connection may linger
                raise
            finally:
                self._hold = self._landing = None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # The connection's life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop sets TCP_NODELAY on every TCP transport
        tcp_keepalive(self.transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._enter(IDLE)
        if not self._fronts.admit(self, self.address, self._limits):
            self._enter(CLOSING)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._ahead, self._at, self._counted = b"", 0, 0
        self._fronts.remove(self)
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
        elif phase is SERVING:
            self._put_ahead(data)
        elif phase is HEAD and continues_head(self._ahead, data):
            self._ahead += data
            self._count_ahead()
        elif phase is not CLOSING:
            self._ahead = self._ahead + data if self._ahead else data
            self._serve_first()

    def eof_received(self) -> None:
        """A client that closes its sending side has left: the transport closes itself after this."""

    # From request to request

    def _serve_first(self) -> None:
        """Serve the first request of what has come ahead, if it is whole but for its body."""
        data, at, head = self._ahead, self._at, self._head
        extent = None if head is None else head.extent(data, at)
        if head is None or extent is None:
            head = self._head = read_head(data, at)
            extent = None if head is None else head.extent(data, at)
        if head is None or extent is None or extent[1] - extent[0] > self._limits.body:
            self._keep(data[at:])
            return
        start, end = extent
        body = data[start:end]
        if end < len(data):
            self._at = end
        else:
            self._ahead, self._at = b"", 0
        self._begin(head, body, end - start)
        self._count_ahead()

    def _serve_next(self) -> None:
        """The turn of a request that came ahead. Answers that the client does not read hold it back."""
        self._due = False
        if self.phase is SERVING and self._errand is None and self.paused_at is None and self.transport is not None:
            self._enter(IDLE)
            self._serve_first()

    def _put_ahead(self, data: bytes) -> None:
        """Bytes of further requests while one is served. Nothing is read on while too many of them lie here."""
        if not self._must_close:  # else none of those requests will be served
            self._ahead, self._at = self._ahead[self._at :] + data, 0
            self._count_ahead()

    def _count_ahead(self) -> None:
        """Count the bytes that came ahead in the budget of all connections, and read on only while they are few."""
        ahead = len(self._ahead) - self._at
        if not ahead and not self._counted:
            return
        is_much = ahead > MAX_AHEAD
        if is_much is self._reading_paused or self._must_close:
            in_kernel = self._in_kernel
        else:  # what is not read stays in the kernel, up to this
            in_kernel = self._in_kernel = self._receive_buffer() if is_much else 0
        self._counted = ahead + in_kernel
        self._fronts.hold(self, ahead + in_kernel, self._limits.unread_budget)
        if is_much is self._reading_paused or self._must_close or self.transport is None:
            return
        self._reading_paused = is_much
        if is_much:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def drop_unread(self) -> None:
        """Drop what came ahead, because its memory is needed. The connection ends after the answer under way.

        It ends at once if the kernel may hold more of it: nothing else frees that memory.
        """
        self._ahead, self._at, self._counted = b"", 0, 0
        if self.transport is None or self.phase is CLOSING:
            return
        self._must_close = True
        if self._in_kernel:
            self.cut()
            return
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
            self._stop_receiving()
        if self._errand is None:
            self.refuse(unread_too_large(), new_id())
            self._close_gently()

    def _keep(self, data: bytes) -> None:
        """Wait for the rest of an unfinished head. Hand what is no ordinary request to the lobby."""
        if self.transport is None or self.phase is CLOSING:
            return
        if is_unfinished(data):
            self._ahead, self._at = data, 0
            if self.phase is IDLE:
                self._enter(HEAD)
            self._count_ahead()
        else:
            self._move(self.transport, data)

    def _begin(self, head: Head, body: bytes, length: int) -> None:
        self._pieces = [body]
        self._body_bytes = length
        self._missing = length - len(body)
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
        """Wait for the next request. One that is here already has its turn after those of other connections."""
        if self.is_draining:
            self.closes = self._must_close = True
        if not self._ahead:
            self._enter(IDLE)
            return
        self.phase = SERVING
        if not self._due:
            self._due = True
            self._outbox.loop.call_soon(self._serve_next)

    def _move(self, transport: asyncio.Transport, data: bytes) -> None:
        """To the lobby, with everything that was not served."""
        self.transport = None
        self._ahead, self._at, self._counted, self._head = b"", 0, 0, None
        lobby = self._lobby()
        if self.is_draining:
            lobby.drain()
        self._fronts.replace(self, lobby)
        if self._reading_paused:
            transport.resume_reading()
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
        self._ahead, self._at = data[len(piece) :], 0
        add_piece(self._pieces, piece)
        self._missing -= len(piece)
        if self._ahead:
            self._count_ahead()
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

    def drain(self) -> None:
        self.is_draining = True
        if self._errand is None:
            self.closes = self._must_close = True

    def finish(self) -> asyncio.Future[None]:
        """The gateway stops: close now, or after the answer under way. The future is done when nobody is connected."""
        self._gone = self._outbox.loop.create_future()
        self._must_close = True
        if self._errand is None:
            self._end()
        return self._gone
