"""The slow path of a client connection, which uses aiohttp's server protocol and HTTP parser.

FastConnection serves ordinary POST requests. At the first request of another kind,
AiohttpConnection takes over the connection. It serves requests to generate an answer right after
the parser, without aiohttp's Request, router and Response objects. All other requests go through
aiohttp's application.

It enforces limits that aiohttp lacks, such as timeouts for headers and body. The limits on the body
itself are in client_body_reader.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http import (
    HttpRequestParser,
    HttpVersion10,
    HttpVersion11,
    RawRequestMessage,
    StreamWriter,
)
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from gateway.config import Limits
from gateway.http import client_body_reader, head_errors
from gateway.http.client_body_reader import CONTINUE
from gateway.http.client_connection import ClientConnection, Serve
from gateway.http.client_timeouts import Phase
from gateway.http.connection_limits import ClientConnections, unread_budget_error
from gateway.http.large_body_parsing import LARGE_BODY, JoinInTurn
from gateway.http.write_queue import WriteQueue
from gateway.protocol.api_table import API_PATHS, stored_api
from gateway.protocol.errors import Failure, GatewayError, new_request_id
from gateway.protocol.request.request_head import MAX_HEAD_BYTES

ALLOWED_METHODS = frozenset({"POST"})
SUPPORTED_VERSIONS = (HttpVersion11, HttpVersion10)  # aiohttp's parser also accepts 0.9 and 2.0

# Bytes. Not equal to MAX_FIELD_BYTES, so that the parser's error shows which was exceeded.
MAX_URI_BYTES = 8190
MAX_FIELD_BYTES = 8192
MAX_HEADERS = 128
WEIGHT = 4  # a request takes about as long as four that FastConnection serves
MAX_UNREAD = 64 * 1024  # bytes that may wait for the parser; the rest stays in the socket
PARSER_SLICE = 16 * 1024  # bytes fed to the parser at once; its objects take several times as much
MAX_QUEUED = 2**30  # disables aiohttp's own limit on queued requests; here at most one is queued

# The parser creates an object per chunk, even of one byte. So a slice of a chunked body is this
# short if it has more lines than MANY_LINES. A chunk has two lines, a head at most MAX_HEADERS + 2.
# They end in CRLF, or the parser refuses them; those of a JSON text usually end in LF.
MANY_CHUNKS_SLICE, MANY_LINES = 512, MAX_HEADERS + 2


class AiohttpConnection(ClientConnection, RequestHandler):
    """A client connection that parses requests with aiohttp.

    It passes requests to generate an answer to `serve`, and all others to aiohttp's application.
    """

    __slots__ = (
        "_body_read",
        "_connections",
        "_descriptor",
        "_has_turn",
        "_head_bytes",
        "_is_chunked",
        "_is_held",
        "_kernel_bytes",
        "_limits",
        "_message",
        "_must_close",
        "_newest_body",
        "_offset",
        "_outbox",
        "_payload",
        "_serve",
        "_source",
        "_turn",
        "_unread",
        "_unread_counted",
        "address",
        "clock",
        "is_draining",
        "paused_at",
        "phase",
        "phase_since",
        "response_lines",
        "will_close",
    )

    def __init__(
        self,
        serve: Serve,
        connections: ClientConnections,
        limits: Limits,
        outbox: WriteQueue,
        manager: web.Server,
    ) -> None:
        RequestHandler.__init__(
            self,
            manager,
            loop=outbox.loop,
            keepalive_timeout=0,  # the sweep watches idle connections too, without a timer each
            # None turns it off, which aiohttp's annotation does not allow for.
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            max_line_size=MAX_URI_BYTES,
            max_field_size=MAX_FIELD_BYTES,
        )
        self._max_msg_queue_size = MAX_QUEUED
        self._parser = HttpRequestParser(
            self,
            outbox.loop,
            self._read_bufsize,
            max_line_size=MAX_URI_BYTES,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_FIELD_BYTES,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )
        self._init_connection(serve, connections, limits, outbox)
        self._message: RawRequestMessage | None = None
        self._payload: StreamReader | None = None
        self._body_read = False
        self._newest_body: StreamReader | None = None
        self._is_chunked = self._is_held = self._has_turn = False
        self._turn: asyncio.Future[None] | None = None
        self._unread = b""
        self._offset = self._head_bytes = self._unread_counted = self._kernel_bytes = 0

    # The Client protocol

    @property
    def headers(self) -> Mapping[str, str]:
        assert self._message is not None
        return self._message.headers

    @property
    def target(self) -> str:
        assert self._message is not None
        return str(self._message.url.raw_path_qs)

    @property
    def is_http_1_0(self) -> bool:
        assert self._message is not None
        return self._message.version < HttpVersion11

    def take_buffered_body(self) -> bytes:
        """Return b"", because this class checks the headers before it reads the body."""
        return b""

    async def read_body(
        self, reserve: Callable[[int], None], join_in_turn: JoinInTurn | None = None
    ) -> bytes:
        """Receive the request's body and return all of it.

        reserve       called with the number of bytes received so far; raises GatewayError if memory
                      is short. The announced length is not reserved, because announcing costs
                      nothing
        join_in_turn  joins the pieces of a large body once it may be parsed

        Raises GatewayError for a body that is too large, too slow, encoded or cut off.
        """
        message, payload = self._message, self._payload
        assert message is not None
        assert payload is not None
        awaits_continue = client_body_reader.check_headers(message.headers, self._limits)
        if payload.is_eof() and not message.chunked:  # it arrived together with its head
            self._body_read = True
            return payload.read_nowait()
        if awaits_continue and not payload.is_eof() and self.transport is not None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._enter(Phase.BODY)
        try:
            if message.chunked:
                pieces = await client_body_reader.read_chunked(payload, reserve, self._limits)
            else:
                pieces = await client_body_reader.read_sized(payload, reserve)
        except RequestPayloadError:
            raise GatewayError(
                Failure.BAD_REQUEST,
                "The body of the request is malformed; its chunked encoding or its length is "
                "wrong.",
            ) from None
        self._body_read = True
        self.phase = Phase.SERVING
        if join_in_turn is not None and payload.total_bytes >= LARGE_BODY:
            return await join_in_turn(pieces)
        return b"".join(pieces)

    # asyncio.Protocol

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading from the client if it is paused. aiohttp calls this after a body read."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def take_turn(self) -> None:
        """Parse the bytes that were read last, because it is this connection's turn to read.

        Reading resumes, unless it is paused for another reason.
        """
        if self.transport is None or self._is_held:
            return
        if self._unread:
            self._parse()
        if self.transport is not None and not (self._reading_paused or self._buffer_paused):
            self.transport.resume_reading()

    def take_over(self, data: bytes, since: float | None) -> None:
        """Continue a connection of FastConnection, with the bytes that it has not served.

        `since` is the monotonic time at which an incomplete request head began; None if there is
        none.
        """
        self.data_received(data)
        if since is not None and self.phase is Phase.HEAD:
            self.phase_since = since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = self.peername
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._enter(Phase.IDLE)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        self._unread_counted = 0
        super().connection_lost(exc)
        self._release_buffers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pause_source()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_source()

    def data_received(self, data: bytes) -> None:
        """Buffer and parse bytes from the client.

        aiohttp calls this with b"" to make the parser continue with the bytes in its own buffer.
        """
        if self.phase is Phase.CLOSING:
            return
        if data:
            self._unread, self._offset = self._unread[self._offset :] + data, 0
            if self._is_held or self._must_wait():
                return
            if (
                self._in_body()
                and self.transport is not None
                and not self._outbox.piece_turns.wait(self, self.transport)
            ):
                return
        else:
            self._feed(data)
        self._parse()
        if not self._messages:  # a part of a head has no turn
            self._has_turn = False
            if self.phase is Phase.IDLE:
                self._enter(Phase.HEAD)

    def _must_wait(self) -> bool:
        # Return whether a later request waits until begin() parses it. Nothing more is read then.
        if (
            self.phase is not Phase.IDLE
            or not self._request_count
            or self._messages  # its head has been parsed
            or self._request_in_progress
            or self.transport is None
        ):
            return False
        turns, size = self._outbox.request_turns, len(self._unread)
        self._has_turn = turns.may_begin_later(self.address, size, WEIGHT)
        if self._has_turn:
            return False
        self.transport.pause_reading()
        turns.wait(self, self.address, size)
        self.phase = Phase.SERVING
        self._is_held = True
        return True

    def _parse(self) -> None:
        # Feed buffered bytes to the parser, up to the end of one request.
        #
        # The next request stays buffered until this one is served. Each slice of a chunked body is
        # parsed in a loop iteration of its own.
        while self._offset < len(self._unread) and self._may_parse():
            piece = self._unread[self._offset : self._offset + PARSER_SLICE]
            is_sized_body = self._in_body() and not self._is_chunked
            if not is_sized_body and piece.count(b"\r\n") > MANY_LINES:
                piece = piece[:MANY_CHUNKS_SLICE]
            self._offset += len(piece)
            self._feed(piece)
            if self._is_chunked and self._offset < len(self._unread):
                self._loop.call_soon(self._resume_parsing)
                break
        if self._offset >= len(self._unread):
            self._unread, self._offset = b"", 0
        self._count_unread()

    def _resume_parsing(self) -> None:
        if self.transport is not None:
            self._parse()

    def _may_parse(self) -> bool:
        if self.phase is Phase.CLOSING or self._reading_paused:
            return False
        return self._in_body() or not (self._messages or self._request_in_progress)

    def _in_body(self) -> bool:
        return self._newest_body is not None and not self._newest_body.is_eof()

    def _feed(self, piece: bytes) -> None:
        request_count = self._request_count
        super().data_received(piece)
        if self._request_count != request_count:
            message, self._newest_body = self._messages[-1]
            self._is_chunked = isinstance(message, RawRequestMessage) and message.chunked
            self._head_bytes = 0
        elif not self._in_body():
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(head_errors.head_too_long(MAX_HEAD_BYTES))

    def _count_unread(self) -> None:
        # Report the unread bytes to the budget that all connections share.
        #
        # Reading is paused while more than MAX_UNREAD bytes wait for the parser.
        waiting = len(self._unread) - self._offset
        if self._buffer_paused is not (waiting > MAX_UNREAD) and not self._must_close:
            self._kernel_bytes = self._receive_buffer_size() if waiting > MAX_UNREAD else 0
        unread = 0 if self._in_body() else waiting + self._head_bytes + self._kernel_bytes
        if unread or self._unread_counted:
            self._unread_counted = unread
            self._connections.set_unread(self, unread, self._limits.unread_budget)
        if self._must_close or self.transport is None:
            return
        if waiting > MAX_UNREAD and not self._buffer_paused:
            self._pause_reading_for_buffer()
        elif waiting <= MAX_UNREAD and self._buffer_paused:
            self._resume_reading_for_buffer()

    def drop_unread(self) -> None:
        """Discard the client's unread bytes to free memory, and close after the current response.

        If the kernel may hold further bytes, the connection is aborted, because only closing the
        socket frees them.
        """
        self._unread, self._offset, self._unread_counted = b"", 0, 0
        if self.transport is None or self.phase is Phase.CLOSING:
            return
        if self._kernel_bytes:
            self._must_close = True
            self._pause_reading_for_buffer()
            self._connections.abort_later(self, self._kernel_bytes)
            self._kernel_bytes = 0
        elif self._messages or self._request_in_progress:
            self._must_close = True
            self._pause_reading_for_buffer()
            self._shrink_receive_buffer()
        else:
            self._refuse_head(unread_budget_error())

    def _refuse_head(self, error: GatewayError) -> None:
        self._must_close = True
        self._unread, self._offset, self._head_bytes, self._parser = b"", 0, 0, None
        self.send_error(error, new_request_id())
        self._linger()

    def eof_received(self) -> bool:  # type: ignore[override]
        if self.phase is Phase.CLOSING:
            self.force_close()
        return self._outbox.close_queue.defer_close(self.transport)

    async def start(self) -> None:
        """Serve the client's requests one after another until either side closes the connection."""
        keep, turns = True, self._outbox.request_turns
        while keep and not self._force_close:
            if not self._messages:
                self._feed(b"")  # bytes that the parser buffered behind the previous request
                self._parse()
            may_begin = self._request_count <= 1  # a pipelined request may not
            if not self._messages:
                await self._wait_for_message()
                may_begin = (
                    self._has_turn
                    or self._request_count <= 1
                    or turns.may_begin_later(self.address, 0, WEIGHT)
                )
            self._has_turn = False
            if not may_begin:  # other connections have their turn first
                await self._wait_for_turn()
                if bool(self._force_close):
                    break
            message, payload = self._messages.popleft()
            if self._parser is not None:
                self._parser.message_consumed()
            self.phase = Phase.SERVING
            self._request_in_progress = True
            try:
                keep = await self._serve_one(message, payload)
            finally:
                self._request_in_progress = False
                self._payload = None  # it refers to the connection: a cycle
                if self._handler_waiter is not None and not self._handler_waiter.done():
                    self._handler_waiter.set_result(None)
            # Responses that the client does not read must not pile up.
            if keep and self._paused and self.transport is not None:
                await self._drain_helper()
            if keep:
                self._enter(Phase.HEAD if self._messages else Phase.IDLE)
        self._close_gracefully()

    async def _wait_for_turn(self) -> None:
        self.phase = Phase.SERVING  # the request has arrived, so its deadlines are met
        self._turn = self._loop.create_future()
        self._outbox.request_turns.wait(self, self.address)
        await self._turn

    def begin(self) -> bool:
        """Serve the request that waits for its turn, if its client has not left.

        Returns whether there was a request to serve.
        """
        if self._is_held:
            self._is_held = False
            return self._begin_held()
        turn, self._turn = self._turn, None
        if turn is None or turn.done():
            return False
        turn.set_result(None)
        return True

    def _begin_held(self) -> bool:
        if self.transport is None or self.phase is Phase.CLOSING:
            return False
        has_left = self._has_hung_up
        if has_left:
            self._unread, self._offset = b"", 0
        self.phase = Phase.IDLE
        self.take_turn()
        if has_left:  # the event loop ends the connection
            return False
        self._has_turn = bool(self._messages)
        if not self._messages and self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        return True

    async def _wait_for_message(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _serve_one(self, message: Any, payload: StreamReader) -> bool:
        # Serve one request; return False if the connection must close afterwards.
        if not isinstance(message, RawRequestMessage):
            self._refuse_unparsed(message.exc)
            return False
        if message.version not in SUPPORTED_VERSIONS:
            self._refuse_unparsed(None)
            return False
        # Upgrades are ignored; but the parser drops the bytes behind one, so nothing more is read.
        if message.upgrade:
            message = message._replace(upgrade=False, should_close=True)
        if self.is_draining:
            message = message._replace(should_close=True)
            # A response to HTTP/1.0 announces the close in any case.
            self.will_close = message.version >= HttpVersion11
        self._message, self._payload = message, payload
        self._body_read = False
        if head_errors.head_size(message) > MAX_HEAD_BYTES:
            self._must_close = True
            self.send_error(head_errors.head_too_long(MAX_HEAD_BYTES), new_request_id())
            return False
        if (
            message.chunked
            and message.headers["Transfer-Encoding"].strip(" \t").lower() != "chunked"
        ):
            self._must_close = True
            self.send_error(head_errors.unknown_coding(), new_request_id())
            return False
        # The second lookup handles a query string or a target in absolute form.
        api = API_PATHS.get(message.path) or API_PATHS.get(message.url.raw_path)
        if api is None or message.method not in ALLOWED_METHODS:
            api = stored_api(message.method, message.url.raw_path)
        if api is None:
            return await self._serve_with_aiohttp(message, payload)
        await self._serve(self, api)
        return not (self._must_close or message.should_close or self.is_http_1_0)

    async def _serve_with_aiohttp(self, message: RawRequestMessage, payload: StreamReader) -> bool:
        # Serve a request with aiohttp's application; return whether the connection stays open.
        if message.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            self.send_error(head_errors.expectation_failed(), new_request_id())
            return False
        if message.method == "CONNECT":
            message_text = "This server is not a proxy: CONNECT is refused."
            self.send_error(GatewayError(Failure.BAD_REQUEST, message_text), new_request_id())
            return False
        assert self._request_factory is not None
        assert self._request_handler is not None
        self._outbox.flush()  # aiohttp writes directly, so queued writes must go first
        task = self._task_handler or asyncio.current_task()
        assert task is not None
        request = self._request_factory(
            message, payload, self, StreamWriter(self, self._loop), task
        )
        try:
            response, reset = await self._handle_request(request, None, self._request_handler)
        except ConnectionError:
            return False
        finally:
            # Breaks a reference cycle, as aiohttp's own loop does.
            request._task = None  # type: ignore[assignment]
        return bool(response.keep_alive) and not (reset or self._must_close) and payload.is_eof()

    def _refuse_unparsed(self, problem: BaseException | None) -> None:
        self._must_close = True
        if problem is not None:
            problem.__traceback__ = None  # its frames refer to the connection: a cycle
        self.send_error(head_errors.invalid_head(problem, MAX_URI_BYTES), new_request_id())

    # What ClientConnection requires

    @property
    def _has_sent_nothing(self) -> bool:
        return self._request_count == 0

    @property
    def _is_not_reading(self) -> bool:
        return bool(self._reading_paused or self._buffer_paused)

    @property
    def _should_close(self) -> bool:
        return self._message is not None and self._message.should_close

    @property
    def _has_unread_body(self) -> bool:
        return not self._body_read

    @property
    def _body_received(self) -> int:
        return 0 if self._payload is None else self._payload.total_bytes

    def _fail_body(self, error: GatewayError) -> None:
        if self._payload is not None:
            self._payload.set_exception(error)

    def drain(self) -> None:
        self.is_draining = True

    def _close_after_flush(self) -> None:
        self.force_close()

    def _close_gracefully(self) -> None:
        self._outbox.flush()
        transport = self.transport
        if transport is None:
            return
        if not self._in_body() and not self._buffer_paused:
            transport.close()
        else:
            self._linger()
            self._release_buffers()

    def _release_buffers(self) -> None:
        # Free the bytes of requests that will not be served.
        #
        # A closing connection may stay for a while to discard input, and reference cycles in
        # aiohttp keep a lost one alive. Without this call the bytes would stay in memory for as
        # long.
        body, self._newest_body = self._newest_body, None
        if body is not None and body.exception() is None:
            body.read_nowait()
        self._unread, self._offset, self._head_bytes, self._parser = b"", 0, 0, None
        self._kernel_bytes = 0  # a closing connection reads and discards what the kernel has
        if self._unread_counted:
            self._unread_counted = 0
            self._connections.set_unread(self, 0, self._limits.unread_budget)
