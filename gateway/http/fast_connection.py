"""The fast path of a client connection: POST requests with a Content-Length header.

protocol/request/request_head.py recognises such a request. It is served in the callback that
receives its last byte, without a task or a request object. At the first request of another kind,
the connection switches to AiohttpConnection for good, so that no request passes two parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import cast

from aiohttp.tcp_helpers import tcp_keepalive

from gateway.config import Limits
from gateway.http.aiohttp_connection import AiohttpConnection
from gateway.http.client_connection import ClientConnection, Serve, add_piece
from gateway.http.client_timeouts import BODY, CLOSING, HEAD, IDLE, SERVING, Phase
from gateway.http.connection_limits import ClientConnections, unread_budget_error
from gateway.http.eager_task import EagerFuture, EagerTask, new_future
from gateway.http.large_body_parsing import LARGE_BODY, JoinInTurn
from gateway.http.socket_send import descriptor_of
from gateway.http.upload_read_turns import LONG_READ
from gateway.http.write_queue import WriteQueue
from gateway.protocol.errors import GatewayError, new_request_id
from gateway.protocol.request.http2_refusal import PREFACE, REFUSAL
from gateway.protocol.request.request_head import (
    RequestHead,
    is_partial_head,
    read_head,
    remains_partial_head,
)

# Bytes of pipelined requests buffered while one is served; the rest stays in the socket.
MAX_UNREAD = 64 * 1024


class FastConnection(ClientConnection, asyncio.Protocol):
    """A client connection that serves ordinary POST requests one after another, without aiohttp.

    headers          the headers of the request being served
    _unread          received bytes; those after `_offset` belong to no request yet
    _unread_counted  number of these bytes that count against the budget for unread bytes
    _kernel_bytes    bytes that the kernel may buffer while reading is paused
    _is_turn_due     whether the first request in `_unread` waits for its turn to begin
    _held_phase      phase to return to when the turn comes; None for a pipelined request
    _head            the newest request head, reused if the next differs only in its length
    _pieces          the body received so far; `_missing` bytes are still to come
    _reserve         function that reserves memory for the body while it is being received
    _closed          future that resolves when the connection is lost; None until close_when_idle()
                     is called
    """

    __slots__ = (
        "_body_bytes",
        "_body_done",
        "_closed",
        "_connections",
        "_descriptor",
        "_head",
        "_held_phase",
        "_is_turn_due",
        "_kernel_bytes",
        "_limits",
        "_max_body",
        "_missing",
        "_must_close",
        "_new_fallback",
        "_offset",
        "_outbox",
        "_pieces",
        "_reading_paused",
        "_reserve",
        "_serve",
        "_source",
        "_task",
        "_unread",
        "_unread_counted",
        "address",
        "clock",
        "headers",
        "is_draining",
        "paused_at",
        "phase",
        "phase_since",
        "response_lines",
        "transport",
        "will_close",
    )

    def __init__(
        self,
        serve: Serve,
        connections: ClientConnections,
        limits: Limits,
        outbox: WriteQueue,
        new_fallback: Callable[[], AiohttpConnection],
    ) -> None:
        # Initialize; `new_fallback` creates the AiohttpConnection that serves other requests.
        self._init_connection(serve, connections, limits, outbox)
        self._new_fallback = new_fallback
        self._max_body = limits.body  # faster to read than the setting
        self._head: RequestHead | None = None
        self.headers: Mapping[str, str] = {}
        self._task: EagerTask | None = None
        self._body_done: EagerFuture | None = None
        self._reserve: Callable[[int], None] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._unread = b""
        self._pieces: list[bytes] = []
        self._offset = self._unread_counted = self._kernel_bytes = 0
        self._body_bytes = self._missing = 0
        self._is_turn_due = self._reading_paused = False
        self._held_phase: Phase | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def target(self) -> str:
        return "" if self._head is None else self._head.api.path

    # The Client protocol, as far as ClientConnection does not implement it

    def take_buffered_body(self) -> bytes:
        """Return the request's body if it arrived together with its head, else b""."""
        return b"" if self._missing else self._pieces.pop()

    async def read_body(
        self, reserve: Callable[[int], None], join_in_turn: JoinInTurn | None = None
    ) -> bytes:
        """Wait for the rest of the request's body, and return all of it.

        reserve       called with the number of bytes received so far; raises GatewayError if memory
                      is short. The announced length is not reserved, because announcing costs
                      nothing
        join_in_turn  joins the pieces of a large body once it may be parsed

        Raises GatewayError if the body arrives too slowly.
        """
        if self._missing:
            reserve(self._body_bytes - self._missing)
            self._reserve, self._body_done = reserve, new_future(self._outbox.loop)
            self._enter(BODY)
            if self._unread:  # more of the body arrived before this call
                data, self._unread, self._offset = self._unread[self._offset :], b"", 0
                self._receive_body(data)
            try:
                await self._body_done
                self.phase = SERVING
                if join_in_turn is not None and self._body_bytes >= LARGE_BODY:
                    self._pieces = [await join_in_turn(self._pieces)]
            except BaseException:
                self._pieces = []  # the connection may linger
                raise
            finally:
                self._reserve = self._body_done = None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop sets TCP_NODELAY on every TCP transport.
        self.transport = cast(asyncio.Transport, transport)
        self._descriptor = descriptor_of(transport)
        tcp_keepalive(self.transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._enter(IDLE)
        if not self._connections.admit(self, self.address, self._limits):
            self._enter(CLOSING)
            transport.close()
        self._connections.on_begun()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._unread, self._offset, self._unread_counted = b"", 0, 0
        self._connections.remove(self)
        if self._task is not None:
            self._task.cancel()
        if self._closed is not None:
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._pause_source()

    def resume_writing(self) -> None:
        self._resume_source()
        # A pipelined request waits while the client has not read the previous response.
        if self._task is None and self.phase is SERVING:
            self._await_next_request()

    def data_received(self, data: bytes) -> None:
        phase = self.phase
        head: RequestHead | None = self._head
        if phase is IDLE and head is not None:
            body = head.whole_body(data)
            # The usual case: exactly one whole request.
            if body is not None and len(body) <= self._max_body:
                outbox: WriteQueue = self._outbox
                if outbox.request_turns.may_begin_later(self.address, len(data)):
                    self._begin(head, body, len(body))
                else:
                    self._unread = data
                    self._wait_for_turn()
                return
        if phase is BODY:
            self._receive_body(data)
        elif phase is SERVING:
            self._buffer_unread(data)
        elif phase is HEAD and remains_partial_head(self._unread, data):
            self._unread += data
            self._count_unread()
            if self.transport is not None and self.phase is HEAD:
                self._outbox.piece_turns.wait(self, self.transport)
        elif phase is CLOSING:
            self._wait_after(data)
        else:
            self._unread = self._unread + data if self._unread else data
            if self._may_begin():
                self._serve_first()
            else:
                self._wait_for_turn()

    def eof_received(self) -> bool:
        """Treat a half-close by the client as a disconnect.

        Returns whether the transport stays open, to be closed by the close queue.
        """
        return self._outbox.close_queue.defer_close(self.transport)

    # From one request to the next

    def _serve_first(self) -> None:
        # Serve the first buffered request once its head is complete; its body may arrive later.
        #
        # A client that has left before its first request was read is not served: it only has to be
        # closed. Otherwise requests of clients that leave would hold up those of others.
        data, offset, head = self._unread, self._offset, self._head
        if head is None and self._has_hung_up:
            self._unread, self._offset = b"", 0
            self._count_unread()
            return
        extent = None if head is None else head.body_span(data, offset)
        if head is None or extent is None:
            head = self._head = read_head(data, offset)
            extent = None if head is None else head.body_span(data, offset)
        if head is None or extent is None or extent[1] - extent[0] > self._max_body:
            self._keep_or_switch(data[offset:])
            return
        start, end = extent
        body = data[start:end]
        if end < len(data):
            self._offset = end
        else:
            self._unread, self._offset = b"", 0
        self._begin(head, body, end - start)
        self._count_unread()

    def _may_begin(self) -> bool:
        # Return whether the request whose first bytes were read may begin now.
        turns, size = self._outbox.request_turns, len(self._unread)
        if self.transport is None:
            return True
        if self._head is None:
            return turns.may_begin(self.address, size)
        return turns.may_begin_later(self.address, size)

    def _wait_for_turn(self) -> None:
        # Let the request in `_unread` wait until begin() is called.
        #
        # Until then nothing more is read, so that the rest of the request stays in the kernel.
        assert self.transport is not None
        self.transport.pause_reading()
        self._outbox.request_turns.wait(self, self.address, len(self._unread))
        self._held_phase, self.phase = self.phase, SERVING
        self._is_turn_due = True

    def begin(self) -> bool:
        """Serve the request that waits for its turn, if its client has not left.

        Returns whether there was a request to serve. A pipelined request waits on while the client
        is behind with reading responses.
        """
        is_due = (
            self._is_turn_due
            and self.phase is SERVING
            and self.paused_at is None
            and self.transport is not None
        )
        self._is_turn_due = False
        if is_due:
            if self.is_draining:
                self.will_close = self._must_close = True
            if self._held_phase is None:
                self._enter(IDLE)
            else:
                self.phase, self._held_phase = self._held_phase, None
                self.take_turn()
                if self._has_hung_up:
                    self._unread, self._offset = b"", 0
                    self._count_unread()
                    return False
            self._serve_first()
            if self._missing and self._reading_paused and self.transport is not None:
                # The last request of a connection that drains: its body must arrive.
                self._reading_paused, self._kernel_bytes = False, 0
                self._count_unread()
                self.transport.resume_reading()
        return is_due

    def _buffer_unread(self, data: bytes) -> None:
        # Buffer bytes of later requests that arrive while a request is being served.
        if not self._must_close:  # otherwise none of those requests will be served
            self._unread, self._offset = self._unread[self._offset :] + data, 0
            self._count_unread()

    def _count_unread(self) -> None:
        # Report the unread bytes to the budget that all connections share.
        #
        # Reading is paused while more than MAX_UNREAD bytes are buffered.
        unread = len(self._unread) - self._offset
        if not unread and not self._unread_counted:
            return
        should_pause = unread > MAX_UNREAD
        has_changed = should_pause is not self._reading_paused and not self._must_close
        if has_changed:  # what is not read stays in the kernel, up to the size of its buffer
            self._kernel_bytes = self._receive_buffer_size() if should_pause else 0
        unread += self._kernel_bytes
        self._unread_counted = unread
        self._connections.set_unread(self, unread, self._limits.unread_budget)
        # The call may have dropped the unread bytes of this connection.
        if not has_changed or self._must_close or self.transport is None:
            return
        self._reading_paused = should_pause
        if should_pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def drop_unread(self) -> None:
        """Discard the client's unread bytes to free memory, and close after the current response.

        If the kernel may hold further bytes, the connection is aborted, because only closing the
        socket frees them.
        """
        self._unread, self._offset, self._unread_counted = b"", 0, 0
        if self.transport is None or self.phase is CLOSING:
            return
        self._must_close = True
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        if self._kernel_bytes:
            self._connections.abort_later(self, self._kernel_bytes)
            self._kernel_bytes = 0
            if self._task is None:
                self._enter(CLOSING)  # the kernel may hold the rest of a request that was dropped
            return
        self._shrink_receive_buffer()
        if self._task is None:
            self.send_error(unread_budget_error(), new_request_id())
            self._close_gracefully()

    def _keep_or_switch(self, data: bytes) -> None:
        # Keep a partial request head for the next read; switch to aiohttp for any other request.
        #
        # An HTTP/2 connection preface is refused, because it is not an HTTP/1.1 request.
        if self.transport is None or self.phase is CLOSING:
            return
        if not self.headers and data.startswith(PREFACE):
            self._must_close = True
            self.write(REFUSAL)
            self._linger()
        elif is_partial_head(data):
            self._unread, self._offset = data, 0
            if self.phase is IDLE:
                self._enter(HEAD)
            self._count_unread()
        else:
            self._switch_to_aiohttp(self.transport, data)

    def _begin(self, head: RequestHead, body: bytes, length: int) -> None:
        self._pieces = [body]
        self._body_bytes = length
        self._missing = length - len(body)
        self.phase = SERVING
        self.headers = head.headers
        task = self._task = EagerTask(self._serve(self, head.api), self._on_served)
        task.step()

    def _on_served(self) -> None:
        # Continue after a response: close the connection, or wait for the next request.
        self._task = None
        if self.transport is None:
            return
        if self._must_close or self._missing:
            self._close_gracefully()
        # Otherwise unread responses would pile up; resume_writing() goes on.
        elif self.paused_at is None:
            self._await_next_request()

    def _await_next_request(self) -> None:
        if not self._unread:
            if self.is_draining:
                self.will_close = self._must_close = True
            self.phase, self.phase_since = IDLE, monotonic()
            return
        self.phase = SERVING
        if not self._is_turn_due:
            self._is_turn_due = True
            self._outbox.request_turns.wait(self, self.address)

    def _switch_to_aiohttp(self, transport: asyncio.Transport, data: bytes) -> None:
        self.transport = None
        self._unread, self._offset, self._unread_counted, self._head = b"", 0, 0, None
        fallback = self._new_fallback()
        if self.is_draining:
            fallback.drain()
        if self._closed is not None:  # aiohttp's server ends the connection instead
            self._closed.set_result(None)
        self._connections.replace(self, fallback)
        transport.resume_reading()
        transport.set_protocol(fallback)
        fallback.connection_made(transport)
        # The transport reports only changes, and this pause has been reported already.
        if self.paused_at is not None:
            fallback.pause_writing()
            fallback.paused_at = self.paused_at
        fallback.take_over(data, self.phase_since if self.phase is HEAD else None)

    # Bodies that arrive in several reads

    def take_turn(self) -> None:
        """Resume reading at this connection's turn, unless another reason pauses it."""
        is_held = self._held_phase is not None
        if self.transport is not None and not self._reading_paused and not is_held:
            self.transport.resume_reading()

    def _wait_after(self, data: bytes) -> None:
        # After a long read, other connections have their turn.
        if len(data) >= LONG_READ and self.transport is not None:
            self._outbox.read_turns.wait(self, self.transport)

    def _receive_body(self, data: bytes) -> None:
        if self._body_done is None or self._reserve is None:
            return
        if len(data) >= LONG_READ:
            self._wait_after(data)
        elif self.transport is not None:
            self._outbox.piece_turns.wait(self, self.transport)
        piece = data[: self._missing]
        self._unread, self._offset = data[len(piece) :], 0
        add_piece(self._pieces, piece)
        self._missing -= len(piece)
        if self._unread:
            self._count_unread()
        try:
            self._reserve(self._body_received)
        except GatewayError as error:
            self._body_done.resolve(error)
            return
        if not self._missing:
            self._body_done.resolve()

    @property
    def _has_sent_nothing(self) -> bool:
        return self._head is None

    @property
    def _body_received(self) -> int:
        return self._body_bytes - self._missing

    @property
    def _has_unread_body(self) -> bool:
        return self._missing > 0

    def _fail_body(self, error: GatewayError) -> None:
        if self._body_done is not None:
            self._body_done.resolve(error)

    # Closing

    def _close_after_flush(self) -> None:
        if self.transport is not None:
            self._outbox.flush()
            self._enter(CLOSING)
            self.transport.close()

    def _close_gracefully(self) -> None:
        if self._missing or self._reading_paused:
            self._linger()
        else:
            self._close_after_flush()

    def drain(self) -> None:
        self.is_draining = True
        # In this phase without a task, a pipelined request waits; the rest of it may still arrive.
        if self._task is None and self.phase is not SERVING:
            self.will_close = self._must_close = True

    def close_when_idle(self) -> asyncio.Future[None]:
        """Close the client connection now, or after the current response.

        A pipelined request that waits for its turn begins now. The returned future resolves when
        the connection is lost, or has passed to aiohttp's server, which ends it.
        """
        self._closed = self._outbox.loop.create_future()
        self.is_draining = True
        self.begin()
        self._must_close = True
        if self._task is None:
            self._close_after_flush()
        return self._closed
