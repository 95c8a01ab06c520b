"""Where client connections go whose requests are not ordinary: aiohttp's own server protocol and parser.

A generation request leaves aiohttp right after its parser and runs in the connection's task: no Request object, no
router, no response object, no task per request. Every other request goes the ordinary aiohttp way. What aiohttp leaves
open is closed here: header, body and reader deadlines, early 413, chunk count, Content-Encoding (faults.md 4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser, HttpVersion10, HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from gateway import refusals
from gateway.answer import Failure, GatewayError, new_id
from gateway.config import Limits
from gateway.connections import ClientConnections, unread_too_large
from gateway.large_bodies import LARGE, Turn
from gateway.openai import LINE
from gateway.outbox import Outbox
from gateway.talk import Phase, Serve, Talk, add_piece

ALLOWED = frozenset({"POST"})
SPOKEN = (HttpVersion11, HttpVersion10)  # the parser lets 0.9 and 2.0 pass as well
CONTINUE = "100-continue"
MAX_URI = 8190  # bytes; unlike the next, so that the parser's complaint tells which of them was exceeded
MAX_FIELD = 8192
MAX_HEADERS = 128
MAX_HEAD = 64 * 1024  # bytes of one request's head
MAX_AHEAD = 64 * 1024  # bytes that may wait for the parser; more stays in the socket
SLICE = 16 * 1024  # bytes that the parser gets at once: what it makes of them takes several times as much
CHUNKED_SLICE = 1024  # as SLICE, for a body whose chunks may be of one byte: an object is made of each
CHUNKS_OF_A_TURN = 32  # of a body that are read in one turn of the event loop
MAX_UNUSED = 2**30  # aiohttp's own bound on requests that wait; here at most one does


class Lobby(Talk, RequestHandler):
    """A client connection: reads calls, hands them to `serve` or to aiohttp's application."""

    __slots__ = (
        *("_ahead", "_at", "_body_read", "_counted", "_fronts", "_head_bytes", "_in_kernel", "_is_chunked", "_limits"),
        *("_message", "_must_close", "_newest_body", "_outbox", "_payload", "_serve", "_source", "address", "closes"),
        *("is_draining", "paused_at", "phase", "since"),
    )

    def __init__(
        self, serve: Serve, fronts: ClientConnections, limits: Limits, outbox: Outbox, manager: web.Server
    ) -> None:
        RequestHandler.__init__(
            self,
            manager,
            loop=outbox.loop,
            keepalive_timeout=0,  # the sweep watches idle connections too, without a timer each
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for off; its annotation does not say so
            auto_decompress=False,
            max_line_size=MAX_URI,
            max_field_size=MAX_FIELD,
        )
        self._max_msg_queue_size = MAX_UNUSED
        self._parser = HttpRequestParser(
            self,
            outbox.loop,
            self._read_bufsize,
            max_line_size=MAX_URI,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_FIELD,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )
        self._set_up(serve, fronts, limits, outbox)
        self._message: RawRequestMessage | None = None
        self._payload: StreamReader | None = None
        self._body_read = False
        self._newest_body: StreamReader | None = None
        self._is_chunked = False
        self._ahead = b""
        self._at = self._head_bytes = self._counted = self._in_kernel = 0

    # What the line sees of a client

    @property
    def headers(self) -> Mapping[str, str]:
        assert self._message is not None
        return self._message.headers

    @property
    def http_1_0(self) -> bool:
        assert self._message is not None
        return self._message.version < HttpVersion11

    def body_at_hand(self) -> bytes:
        """Nothing: here a body is looked at before it is read."""
        return b""

    async def body(self, hold: Callable[[int], None], turn: Turn | None = None) -> bytes:
        """The request's body, whole. Raises GatewayError when it is refused: too large, too slow, encoded, cut.

        `hold` is told how many bytes have come so far, not how many were announced: announcing is free. It may refuse.
        A large body is joined after `turn`.
        """
        message, payload = self._message, self._payload
        assert message is not None
        assert payload is not None
        self._check_body_headers(message)
        if payload.is_eof() and not message.chunked:  # it came together with its head
            self._body_read = True
            return payload.read_nowait()
        self._enter(Phase.BODY)
        try:
            pieces = await (self._read_chunked if message.chunked else self._read_sized)(payload, hold)
        except RequestPayloadError:
            raise GatewayError(Failure.BAD_REQUEST, "The request body is not framed correctly.") from None
        self._body_read = True
        self.phase = Phase.SERVING
        if turn is not None and payload.total_bytes >= LARGE:
            await turn()
        return b"".join(pieces)

    # The connection's life

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this after every read of a body; only a pause gives it something to do (6 us otherwise)."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def take_over(self, data: bytes, since: float | None) -> None:
        """Read on with what the front has not served; `since` is when an unfinished head began."""
        self.data_received(data)
        if since is not None and self.phase is Phase.HEAD:
            self.since = since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = self.peername
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._enter(Phase.IDLE)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._fronts.remove(self)
        self._counted = 0
        super().connection_lost(exc)
        self._forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pause_source()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_source()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client; none of them: aiohttp wants the parser to go on with what it has."""
        if self.phase is Phase.CLOSING:
            return
        if data:
            self._ahead, self._at = self._ahead[self._at :] + data, 0
        else:
            self._feed(data)
        self._parse()
        if self.phase is Phase.IDLE and not self._messages:
            self._enter(Phase.HEAD)

    def _parse(self) -> None:
        """Feed the parser, up to the end of one request: the next one comes when that was served."""
        while self._at < len(self._ahead) and self._may_parse():
            piece = self._ahead[self._at : self._at + (CHUNKED_SLICE if self._is_chunked else SLICE)]
            self._at += len(piece)
            self._feed(piece)
            if self._is_chunked and self._at < len(self._ahead):
                self._loop.call_soon(self._parse_on)
                break
        if self._at >= len(self._ahead):
            self._ahead, self._at = b"", 0
        self._count_unread()

    def _parse_on(self) -> None:
        if self.transport is not None:
            self._parse()

    def _may_parse(self) -> bool:
        if self.phase is Phase.CLOSING or self._reading_paused:
            return False
        return self._in_body() or not (self._messages or self._request_in_progress)

    def _in_body(self) -> bool:
        """Whether what comes next belongs to the body of a request."""
        return self._newest_body is not None and not self._newest_body.is_eof()

    def _feed(self, piece: bytes) -> None:
        known = self._request_count
        super().data_received(piece)
        if self._request_count != known:
            message, self._newest_body = self._messages[-1]
            self._is_chunked = isinstance(message, RawRequestMessage) and message.chunked
            self._head_bytes = 0
        elif not self._in_body():
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD:
                self._refuse_head(refusals.head_too_long(MAX_HEAD))

    def _count_unread(self) -> None:
        """Count what belongs to no request yet in the budget of all connections; read on only while it is little."""
        ahead = len(self._ahead) - self._at
        if self._buffer_paused is not (ahead > MAX_AHEAD) and not self._must_close:
            self._in_kernel = self._receive_buffer() if ahead > MAX_AHEAD else 0
        unread = 0 if self._in_body() else ahead + self._head_bytes + self._in_kernel
        if unread or self._counted:
            self._counted = unread
            self._fronts.hold(self, unread, self._limits.unread_budget)
        if self._must_close or self.transport is None:
            return
        if ahead > MAX_AHEAD and not self._buffer_paused:
            self._pause_reading_for_buffer()
        elif ahead <= MAX_AHEAD and self._buffer_paused:
            self._resume_reading_for_buffer()

    def drop_unread(self) -> None:
        """Drop what came ahead, because its memory is needed. The connection ends after the answer under way.

        It ends at once if the kernel may hold more of it: nothing else frees that memory.
        """
        self._ahead, self._at, self._counted = b"", 0, 0
        if self.transport is None or self.phase is Phase.CLOSING:
            return
        if self._in_kernel:
            self._must_close = True
            self.cut()
        elif self._messages or self._request_in_progress:
            self._must_close = True
            self._pause_reading_for_buffer()
            self._stop_receiving()
        else:
            self._refuse_head(unread_too_large())

    def _refuse_head(self, error: GatewayError) -> None:
        """Answer a request whose head will not be read to its end, and close."""
        self._must_close = True
        self._ahead, self._at, self._head_bytes, self._parser = b"", 0, 0, None
        self.refuse(error, new_id())
        self._linger()

    def eof_received(self) -> None:
        if self.phase is Phase.CLOSING:
            self.force_close()

    async def start(self) -> None:
        """The connection's task: one request after the other until somebody wants to close."""
        keep = True
        while keep and not self._force_close:
            if not self._messages:
                self._feed(b"")  # what the parser has kept behind the request before
                self._parse()
            if not self._messages:
                await self._next()
            elif self._request_count > 1:
                # The next request came ahead. Other connections have their turns first.
                await asyncio.sleep(0)
                if bool(self._force_close):
                    break
            message, payload = self._messages.popleft()
            if self._parser is not None:
                self._parser.message_consumed()
            self.phase = Phase.SERVING
            self._request_in_progress = True
            try:
                keep = await self._one(message, payload)
            finally:
                self._request_in_progress = False
                if self._handler_waiter is not None and not self._handler_waiter.done():
                    self._handler_waiter.set_result(None)
            if keep and self._paused and self.transport is not None:
                await self._drain_helper()  # answers that nobody reads must not pile up behind one another
            if keep:
                self._enter(Phase.HEAD if self._messages else Phase.IDLE)
        self._close_gently()

    async def _next(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _one(self, message: Any, payload: StreamReader) -> bool:
        """Serve one request; False when the connection must close after it."""
        if not isinstance(message, RawRequestMessage):
            self._refuse_unparsed(message.exc)
            return False
        if message.version not in SPOKEN:
            self._refuse_unparsed(None)
            return False
        if message.upgrade:  # ignored; but the parser drops what came with it, so nothing else is read here
            message = message._replace(upgrade=False, should_close=True)
        if self.is_draining:
            message = message._replace(should_close=True)
            self.closes = message.version >= HttpVersion11  # an answer to 1.0 says so in any case
        self._message, self._payload = message, payload
        self._body_read = False
        if refusals.head_size(message) > MAX_HEAD:
            self._must_close = True
            self.refuse(refusals.head_too_long(MAX_HEAD), new_id())
            return False
        if message.chunked and message.headers["Transfer-Encoding"].strip(" \t").lower() != "chunked":
            self._must_close = True
            self.refuse(refusals.coding_not_known(), new_id())
            return False
        api = LINE.get(message.path) or LINE.get(message.url.raw_path)  # the latter: a query, or absolute form
        if api is None or message.method not in ALLOWED:
            return await self._ordinary(message, payload)
        await self._serve(self, api)
        self._payload = None
        return not (self._must_close or message.should_close or self.http_1_0)

    async def _ordinary(self, message: RawRequestMessage, payload: StreamReader) -> bool:
        """aiohttp's own way, in this task."""
        if message.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            self.refuse(refusals.expectation_failed(), new_id())
            return False
        if message.method == "CONNECT":
            self.refuse(GatewayError(Failure.BAD_REQUEST, "This server is no proxy: CONNECT is refused."), new_id())
            return False
        assert self._request_factory is not None
        assert self._request_handler is not None
        self._outbox.flush()  # aiohttp writes directly: what was posted comes first
        task = self._task_handler or asyncio.current_task()
        assert task is not None
        request = self._request_factory(message, payload, self, StreamWriter(self, self._loop), task)
        try:
            response, reset = await self._handle_request(request, None, self._request_handler)
        except ConnectionError:
            return False
        finally:
            request._task = None  # type: ignore[assignment]  # breaks the cycle, as aiohttp's own loop does
        return bool(response.keep_alive) and not (reset or self._must_close) and payload.is_eof()

    def _refuse_unparsed(self, problem: BaseException | None) -> None:
        self._must_close = True
        self.refuse(refusals.unparsed(problem, MAX_URI), new_id())

    # Reading a body

    def _check_body_headers(self, message: RawRequestMessage) -> None:
        headers = message.headers
        encoding = headers.get("Content-Encoding")
        if encoding is not None and encoding.lower() != "identity":
            raise GatewayError(Failure.UNSUPPORTED_MEDIA, "Content-Encoding is not accepted; send the body as it is.")
        if int(headers.get("Content-Length", 0)) > self._limits.body:
            raise self._too_large()
        expect = headers.get("Expect")
        if expect is None:
            return
        if expect.lower() != CONTINUE:
            raise refusals.expectation_failed()
        if self.transport is not None and self._payload is not None and not self._payload.is_eof():
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _read_sized(self, payload: StreamReader, hold: Callable[[int], None]) -> list[bytes]:
        pieces = [payload.read_nowait()]
        total = len(pieces[0])
        hold(total)
        while not payload.is_eof():
            piece = await payload.readany()
            total += len(piece)
            hold(total)
            add_piece(pieces, piece)
        pieces.append(payload.read_nowait())
        return pieces

    async def _read_chunked(self, payload: StreamReader, hold: Callable[[int], None]) -> list[bytes]:
        pieces = [b""]
        total = chunks = 0
        while not payload.at_eof():
            piece, _ = await payload.readchunk()
            add_piece(pieces, piece)
            total += len(piece)
            chunks += 1
            if total > self._limits.body:
                raise self._too_large()
            hold(total)
            if chunks > self._limits.body_chunks:
                raise GatewayError(Failure.TOO_LARGE, f"The body came in more than {self._limits.body_chunks} chunks.")
            if not chunks % CHUNKS_OF_A_TURN:
                await asyncio.sleep(0)
        return pieces

    def _too_large(self) -> GatewayError:
        return GatewayError(Failure.TOO_LARGE, f"The request body is larger than {self._limits.body} bytes.")

    # What Talk asks

    @property
    def _silent(self) -> bool:
        return self._request_count == 0

    @property
    def _is_deaf(self) -> bool:
        return bool(self._reading_paused or self._buffer_paused)

    @property
    def _last(self) -> bool:
        return self._message is not None and self._message.should_close

    @property
    def _body_left(self) -> bool:
        return not self._body_read

    @property
    def _arrived(self) -> int:
        return 0 if self._payload is None else self._payload.total_bytes

    def _fail_body(self, error: GatewayError) -> None:
        if self._payload is not None:
            self._payload.set_exception(error)

    def drain(self) -> None:
        self.is_draining = True

    def _end(self) -> None:
        self.force_close()

    def _close_gently(self) -> None:
        self._outbox.flush()
        transport = self.transport
        if transport is None:
            return
        if not self._in_body() and not self._buffer_paused:
            transport.close()
        else:
            self._linger()
            self._forget()

    def _forget(self) -> None:
        """Free what came of requests that will not be served.

        The connection may linger, and once it is lost the reference cycles of aiohttp's objects keep it for a while.
        """
        body, self._newest_body = self._newest_body, None
        if body is not None and body.exception() is None:
            body.read_nowait()
        self._ahead, self._at, self._head_bytes, self._parser = b"", 0, 0, None
        if self._counted:
            self._counted = 0
            self._fronts.hold(self, 0, self._limits.unread_budget)
