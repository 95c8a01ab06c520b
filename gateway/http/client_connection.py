"""The common base of both classes of client connection: responses, backpressure and timeouts.

The subclasses read the requests. FastConnection (http/fast_connection.py) serves ordinary POST
requests, and AiohttpConnection (http/aiohttp_connection.py) all others.
"""

from __future__ import annotations

import asyncio
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gateway.config import Limits
from gateway.http.client_timeouts import (
    BODY,
    CLOSING,
    HEAD,
    IDLE,
    SERVING,
    Expiry,
    Phase,
    body_expiry,
    closing_expiry,
    head_expiry,
    idle_expiry,
    reader_expiry,
)
from gateway.protocol.api_table import Api
from gateway.protocol.error_formats import OPENAI, ErrorFormat
from gateway.protocol.errors import (
    Failure,
    GatewayError,
    new_request_id,
    reason_phrase,
    retry_headers,
)
from gateway.protocol.response.date_header import ResponseClock, ResponseLines

if TYPE_CHECKING:
    from gateway.http.client_interface import Client
    from gateway.http.connection_limits import ClientConnections
    from gateway.http.engine_connections import UpstreamConnection
    from gateway.http.write_queue import WriteQueue

# A body piece shorter than this is extended by the next piece instead of kept on its own.
MIN_PIECE = 4 * 1024
MIN_RECEIVE_BUFFER = 4096  # bytes the kernel may buffer for a connection that is not read any more
POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # Linux only; elsewhere only a reset is detected

# Two bases with non-empty slots cannot be combined, so the subclasses declare the slots.
_NO_SLOTS: tuple[str, ...] = ()

Serve = Callable[["Client", Api], Coroutine[Any, Any, None]]


def add_piece(pieces: list[bytes], piece: bytes) -> None:
    """Append a piece of a body to the list `pieces`, or to its last piece if that is small.

    Merging saves memory: a bytes object takes more memory than the few bytes of a small piece.
    """
    if len(pieces[-1]) < MIN_PIECE:
        pieces[-1] += piece
    else:
        pieces.append(piece)


def is_pending(sock: socket.socket, events: int) -> bool:
    """Return whether an event such as select.POLLIN, or an error, has occurred on the socket.

    `events` has the events as poll(2) takes them. The call does not wait.
    """
    poll = select.poll()
    poll.register(sock.fileno(), events)
    return bool(poll.poll(0))


class ClientConnection(ABC):
    """What both classes of client connection share: responses, backpressure and timeouts.

    phase            what the connection is waiting for
    phase_since      monotonic time at which the phase began
    paused_at        monotonic time since which the client reads too slowly; None while it keeps up
    is_draining      whether another process accepts new connections; the next response is the last
                     one here
    will_close       whether the next response is the last one, which its head announces
    _must_close      whether to close the connection after the current response
    clock            supplies the Date header line of responses
    response_lines   header lines of every response: the date, and those that the current request
                     adds
    _descriptor      descriptor of the socket if it may be sent to directly, else -1
    _reading_paused  whether reading is paused because too much is buffered; then the event loop
                     cannot notice a disconnect
    """

    __slots__ = _NO_SLOTS

    transport: asyncio.Transport | None
    address: str
    phase: Phase
    phase_since: float
    paused_at: float | None
    clock: ResponseClock
    response_lines: ResponseLines
    _connections: ClientConnections
    _limits: Limits
    _serve: Serve
    _source: UpstreamConnection | None
    _must_close: bool
    is_draining: bool
    will_close: bool
    _outbox: WriteQueue
    _descriptor: int
    _reading_paused: bool

    def _init_connection(
        self, serve: Serve, connections: ClientConnections, limits: Limits, outbox: WriteQueue
    ) -> None:
        # Initialize the shared fields; `connections` has all client connections of the process.
        self._serve = serve
        self._connections = connections
        self._limits = limits
        self._outbox = outbox
        self.clock = self.response_lines = connections.clock
        self._source = None
        self._descriptor = -1
        self._must_close = self.is_draining = self.will_close = False
        self.address = ""
        self.phase = IDLE
        self.phase_since = 0.0
        self.paused_at = None

    @property
    def is_http_1_0(self) -> bool:
        return False

    @property
    @abstractmethod
    def _has_unread_body(self) -> bool:
        """Return whether part of the current request's body has not been read.

        If so, the next request cannot be parsed.
        """

    @property
    def _should_close(self) -> bool:
        return False

    # Responses

    def write(self, data: bytes) -> None:
        """Queue part of a response to be sent; drop it if the client has disconnected."""
        transport = self.transport
        if transport is not None:
            # With this annotation, compiled code calls the method without a lookup by name.
            outbox: WriteQueue = self._outbox
            outbox.enqueue(transport, data, self._descriptor)

    def send_error(self, error: GatewayError, request_id: str, shape: ErrorFormat = OPENAI) -> None:
        """Send a complete error response, in the format of the client's API (`shape`)."""
        headers = [*shape.id_headers(request_id), *retry_headers(error)]
        self.send_response(error.status, shape.body(error, request_id), headers)

    def send_response(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        if self._has_unread_body or self.is_http_1_0:
            self._must_close = True
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        if self._must_close or self._should_close:
            lines += "connection: close\r\n"
        first = f"HTTP/1.1 {status} {reason_phrase(status)}\r\ncontent-type: application/json\r\n"
        head = f"{first}{self.response_lines.line}content-length: {len(body)}\r\n{lines}\r\n"
        self.write(head.encode("latin-1", "replace") + body)

    def close_after_write(self) -> None:
        """Close the connection once the bytes written so far have been sent.

        The client then sees that the response is incomplete.
        """
        self._must_close = True

    @abstractmethod
    def drain(self) -> None:
        """Close the connection after the next response, which announces this in its head.

        The head of a response in progress has been sent without that announcement, so the client
        may still send one more request.
        """

    # Backpressure: the engine must not send faster than the client reads

    @property
    def is_writing_paused(self) -> bool:
        return self.paused_at is not None

    def set_source(self, source: UpstreamConnection | None) -> None:
        self._source = source
        if source is not None and self.paused_at is not None:
            source.pause()

    def _pause_source(self) -> None:
        self.paused_at = monotonic()
        if self._source is not None:
            self._source.pause()

    def _resume_source(self) -> None:
        self.paused_at = None
        if self._source is not None:
            self._source.resume()

    # Deadlines, checked by one sweep over all connections instead of a timer for each

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_since = monotonic()

    def sweep(self, now: float) -> bool:
        """Close or abort the connection if a timeout has passed or the client has disconnected.

        Returns whether it did. `now` is in monotonic seconds. The event loop itself cannot notice a
        disconnect while reading is paused.
        """
        expiry = self._expiry(now)
        if expiry is Expiry.ABORT:
            self.abort()
        elif expiry is Expiry.CLOSE:
            if not self._polls(select.POLLIN):  # a request may have arrived since the last read
                self._close_after_flush()
        elif expiry is Expiry.HEAD_TIMEOUT:
            self._time_out("The headers of the request did not arrive in time.")
        elif expiry is Expiry.BODY_TIMEOUT:
            message = "The request's body did not arrive in time."
            self._fail_body(GatewayError(Failure.REQUEST_TIMEOUT, message))
        elif self.phase is SERVING and self._is_not_reading and self._has_hung_up:
            self.abort()
        else:
            return False
        return True

    def _expiry(self, now: float) -> Expiry | None:
        # Return how to end the connection at time `now`, or None while no deadline has passed.
        limits, phase, age_s = self._limits, self.phase, now - self.phase_since
        if self.paused_at is not None:
            expiry = reader_expiry(now - self.paused_at, limits)
            if expiry is not None:
                return expiry
        if phase is IDLE:
            return idle_expiry(age_s, limits, has_sent_nothing=self._has_sent_nothing)
        if phase is HEAD:
            return head_expiry(age_s, limits)
        if phase is BODY:
            return body_expiry(age_s, self._body_received, limits)
        if phase is CLOSING and self.transport is not None:
            return closing_expiry(age_s, limits, is_flushing=self.transport.is_closing())
        return None

    @property
    def _is_not_reading(self) -> bool:
        return self._reading_paused

    @abstractmethod
    def drop_unread(self) -> None:
        """Discard received bytes that belong to no request yet; free their memory budget."""

    @property
    def _has_hung_up(self) -> bool:
        # Return whether the client has closed its side while bytes that it sent are still unread.
        return self._polls(POLLRDHUP)

    def _polls(self, events: int) -> bool:
        sock = self._socket
        return sock is not None and is_pending(sock, events)

    @property
    def _socket(self) -> socket.socket | None:
        if self.transport is None:
            return None
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        return None if sock is None or sock.fileno() < 0 else sock

    def _receive_buffer_size(self) -> int:
        # Return how many bytes the kernel may buffer while the connection is not read.
        sock = self._socket
        return 0 if sock is None else sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def _shrink_receive_buffer(self) -> None:
        # Reduce the kernel's receive buffer to its minimum, because nothing more will be read.
        sock = self._socket
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIN_RECEIVE_BUFFER)

    @property
    @abstractmethod
    def _has_sent_nothing(self) -> bool:
        """Return whether the client has not sent a complete request head yet."""

    @property
    @abstractmethod
    def _body_received(self) -> int:
        """Return the number of bytes of the current request's body that have been received."""

    @abstractmethod
    def _fail_body(self, error: GatewayError) -> None:
        """Make the pending read_body() call raise `error`. Does nothing if no call is pending."""

    def _time_out(self, message: str) -> None:
        self._must_close = True
        self.send_error(GatewayError(Failure.REQUEST_TIMEOUT, message), new_request_id())
        self._outbox.flush()
        self._close_after_flush()

    # Closing

    @abstractmethod
    def _close_after_flush(self) -> None:
        """Close the connection once all written bytes have been sent."""

    def abort(self) -> None:
        """Close the connection immediately. Bytes that have not been sent are lost."""
        if self.transport is not None:
            self.transport.abort()

    def _linger(self) -> None:
        # Half-close and discard input, so that a client that still sends can read the response.
        transport = self.transport
        if transport is not None:
            self._outbox.flush()
            self._descriptor = -1
            self._enter(CLOSING)
            if transport.can_write_eof():
                with suppress(OSError):  # the client reset the connection while reading was paused
                    transport.write_eof()
            transport.resume_reading()
