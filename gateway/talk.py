"""What both kinds of client connection do alike: write answers, pass backpressure on, watch their time, close gently.

gateway/front.py serves ordinary requests, gateway/lobby.py all others; neither reads a byte here.
"""

from __future__ import annotations

import asyncio
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, Any

from gateway.answer import Failure, GatewayError, body_of, headers_of, new_id, phrase_of
from gateway.config import Limits
from gateway.openai import Api

if TYPE_CHECKING:
    from gateway.client import Client
    from gateway.connections import ClientConnections
    from gateway.outbox import Outbox
    from gateway.upstream import Connection

JOINED = 4 * 1024  # bytes of a piece of a body to which the next piece is joined
LINGER_S = 1.0  # how long a refused upload may go on arriving before the socket is cut
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a reset alone is seen
LEAST_BUFFER = 4096  # bytes that the kernel receives on a connection of which nothing more will be read
_NO_SLOTS: tuple[str, ...] = ()  # two bases with slots of their own cannot be joined: the subclasses declare them


class Phase(Enum):
    """What a connection waits for, and so which deadline holds."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    SERVING = auto()
    CLOSING = auto()


IDLE, HEAD, BODY, SERVING, CLOSING = Phase  # asking an Enum for a member takes ten times as long

Serve = Callable[["Client", Api], Coroutine[Any, Any, None]]


def add_piece(pieces: list[bytes], piece: bytes) -> None:
    """Put it behind the others; small ones are joined, since each object takes more memory than its bytes."""
    if len(pieces[-1]) < JOINED:
        pieces[-1] += piece
    else:
        pieces.append(piece)


class Talk(ABC):
    """One client connection. Subclasses read; they have slots for what is named here.

    phase, since       what is waited for, and from when (monotonic seconds)
    paused_at          since when the client has been reading too slowly; None while it keeps up
    _must_close        the connection ends with the answer under way
    is_draining        another process takes new connections: the next answer is this connection's last
    closes             the answer to come is the last one, and its head says so
    _reading_paused    more has come than may lie here: the event loop does not look whether the client has left
    """

    __slots__ = _NO_SLOTS

    transport: asyncio.Transport | None
    address: str
    phase: Phase
    since: float
    paused_at: float | None
    _fronts: ClientConnections
    _limits: Limits
    _serve: Serve
    _source: Connection | None
    _must_close: bool
    is_draining: bool
    closes: bool
    _outbox: Outbox
    _reading_paused: bool

    def _set_up(self, serve: Serve, fronts: ClientConnections, limits: Limits, outbox: Outbox) -> None:
        """The beginning of a connection's state. `fronts` are all connections: those that the sweep looks at."""
        self._serve = serve
        self._fronts = fronts
        self._limits = limits
        self._outbox = outbox
        self._source = None
        self._must_close = self.is_draining = self.closes = False
        self.address = ""
        self.phase = IDLE
        self.since = 0.0
        self.paused_at = None

    @property
    def http_1_0(self) -> bool:
        return False

    @property
    @abstractmethod
    def _body_left(self) -> bool:
        """Whether a part of the request's body was not read: what follows on the connection cannot be told from it."""

    @property
    def _last(self) -> bool:
        """Whether the client asked to close after this answer."""
        return False

    # Answers

    def write(self, data: bytes) -> None:
        """Bytes of an answer, as they come. Dropped when the client has gone."""
        transport = self.transport
        if transport is not None:
            outbox: Outbox = self._outbox  # every chunk comes by here: told so, a compiler calls it directly
            outbox.post(transport, data)

    def refuse(self, error: GatewayError, request_id: str) -> None:
        """Answer with an error of the table."""
        self.answer(error.status, body_of(error), [("x-request-id", request_id), *headers_of(error)])

    def answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        """A whole JSON answer."""
        if self._body_left or self.http_1_0:
            self._must_close = True
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        if self._must_close or self._last:
            lines += "connection: close\r\n"
        first = f"HTTP/1.1 {status} {phrase_of(status)}\r\ncontent-type: application/json\r\n"
        head = f"{first}content-length: {len(body)}\r\n{lines}\r\n"
        self.write(head.encode("latin-1", "replace") + body)

    def hang_up(self) -> None:
        """Close after what was written: the answer cannot be finished and the client must see that."""
        self._must_close = True

    @abstractmethod
    def drain(self) -> None:
        """Serve one more request on this connection, and say in its answer that the connection closes. An answer under
        way has not said so, and the client may use the connection once more."""

    # Backpressure: the engine may not write faster than the client reads

    @property
    def writing_paused(self) -> bool:
        return self.paused_at is not None

    def set_source(self, source: Connection | None) -> None:
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

    # Deadlines, driven by one sweep over all connections instead of a timer each

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = monotonic()

    def sweep(self, now: float) -> None:
        """End what has lasted too long: silence, dripped headers or bodies, a client that does not read."""
        limits, age = self._limits, now - self.since
        if self.paused_at is not None and now - self.paused_at > limits.slow_reader:
            self.cut()
        elif self.phase is IDLE:
            is_due = age > limits.idle_timeout or (self._silent and age > limits.headers_timeout)
            if is_due and not self._polls(select.POLLIN):  # a request may have come since the last read
                self._end()
        elif self.phase is HEAD:
            if age > limits.headers_timeout:
                self._time_out("The request's headers did not arrive in time.")
        elif self.phase is BODY:
            too_slow = age > 1 and self._arrived < (age - 1) * limits.body_min_rate
            if age > limits.body_timeout or too_slow:
                self._fail_body(GatewayError(Failure.REQUEST_TIMEOUT, "The request's body did not arrive in time."))
        elif self.phase is SERVING:
            if self._is_deaf and self._has_left:
                self.cut()
        elif self.phase is CLOSING and self.transport is not None:
            leaving = self.transport.is_closing()  # all that is left is an answer on its way to who asked for it
            if age > (limits.slow_reader if leaving else LINGER_S):
                self.cut()

    @property
    def _is_deaf(self) -> bool:
        """Whether nothing is read from the socket, so that the event loop cannot notice that the client has left."""
        return self._reading_paused

    @abstractmethod
    def drop_unread(self) -> None:
        """Give up the bytes that belong to no request yet. The connection does not count them any more."""

    @property
    def _has_left(self) -> bool:
        """Whether the client has closed its side, before all that it sent was read."""
        return self._polls(_HANG_UP)

    def _polls(self, events: int) -> bool:
        """Whether the socket has one of these events, or an error, at this moment."""
        sock = self._socket
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), events)
        return bool(poll.poll(0))

    @property
    def _socket(self) -> socket.socket | None:
        found: socket.socket | None = None
        if self.transport is not None:
            found = self.transport.get_extra_info("socket")
        return found

    def _receive_buffer(self) -> int:
        """Bytes that the kernel may keep for the connection while nothing is read from it."""
        sock = self._socket
        return 0 if sock is None or sock.fileno() < 0 else sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def _stop_receiving(self) -> None:
        """Have the kernel keep next to nothing of what still comes: it will not be read."""
        sock = self._socket
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LEAST_BUFFER)

    @property
    @abstractmethod
    def _silent(self) -> bool:
        """Whether the client has never asked for anything."""

    @property
    @abstractmethod
    def _arrived(self) -> int:
        """Bytes of the body that have come."""

    @abstractmethod
    def _fail_body(self, error: GatewayError) -> None:
        """Whoever waits for the rest of the body gets this instead."""

    def _time_out(self, message: str) -> None:
        self._must_close = True
        self.refuse(GatewayError(Failure.REQUEST_TIMEOUT, message), new_id())
        self._outbox.flush()
        self._end()

    # Closing

    @abstractmethod
    def _end(self) -> None:
        """Close when everything written is out."""

    def cut(self) -> None:
        """Close at once, whatever is still to be written."""
        if self.transport is not None:
            self.transport.abort()

    def _linger(self) -> None:
        """Close so that the answer is read even while the client still sends: half-close, discard, then cut."""
        transport = self.transport
        if transport is not None:
            self._outbox.flush()
            self._enter(CLOSING)
            if transport.can_write_eof():
                with suppress(OSError):  # reset by the client, while nobody read
                    transport.write_eof()
            transport.resume_reading()
