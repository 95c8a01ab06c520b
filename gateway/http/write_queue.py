"""Sends the writes of each event loop iteration at its end; defers some chunks to later ones.

Handling thirty reads and then thirty writes keeps the processor's caches warm, which saves CPU time
(docs/performance.md).

When several engines finish a decode step at once, hundreds of chunks arrive. Relaying them all
would delay new requests. Therefore one iteration relays some of them and defers the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway.http.burst_reads import BurstReads
from gateway.http.close_queue import CloseQueue
from gateway.http.connection_fairness import RequestTurns
from gateway.http.long_engine_reads import LongReads
from gateway.http.socket_send import send_now
from gateway.http.upload_read_turns import PIECE_TURNS, ReadTurns

if TYPE_CHECKING:
    from gateway.protocol.response.relay import Relay

WRITES_PER_TURN = 32  # writes per loop iteration, about a millisecond

# Chunks that may be deferred. Beyond that they are relayed immediately, because otherwise the
# gateway would read from engines much faster than clients receive.
MAX_DEFERRED = 1024
MAX_DEFERRED_BYTES = 4 * 1024 * 1024  # maximum bytes of all deferred chunks together
BYTES_PER_TURN = 256 * 1024  # deferred bytes that are relayed per loop iteration, about


class DeferringConnection(Protocol):
    """The interface of a connection to an engine that can relay a chunk in a later iteration."""

    def process_deferred(self, relay: Relay, data: bytes) -> None: ...


class WriteQueue:
    """The queued socket writes of one event loop, in order.

    Call flush() before closing a transport, so that its queued writes are sent.

    budget_spent   whether this iteration has written enough; if so, further chunks from engines
                   must be deferred to a later one
    read_turns     client connections that wait to read again after a long read
    burst_reads    connections to engines that pause reading to collect small chunks
    long_reads     the long reads from engines, which are relayed in slices
    piece_turns    client connections that wait to read the next part of a request
    request_turns  new client connections, and requests of a crowd, that wait to begin
    close_queue    closes the connections of disconnected clients
    """

    __slots__ = (
        *("_callbacks", "_deferred", "_deferred_bytes", "_is_scheduled", "_queue", "budget_spent"),
        *("burst_reads", "close_queue", "long_reads", "loop", "piece_turns", "read_turns"),
        "request_turns",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.burst_reads = BurstReads(loop)
        self.long_reads = LongReads(loop)
        self.read_turns = ReadTurns(loop)
        self.piece_turns = ReadTurns(loop, PIECE_TURNS)
        self.request_turns = RequestTurns(loop)
        self.close_queue = CloseQueue(loop)
        self.budget_spent = False
        self._is_scheduled = False
        self._callbacks: list[Callable[[], None]] = []
        self._queue: list[tuple[asyncio.Transport, bytes, int]] = []
        self._deferred: deque[tuple[DeferringConnection, Relay, bytes]] = deque()
        self._deferred_bytes = 0

    def enqueue(self, transport: asyncio.Transport, data: bytes, descriptor: int = -1) -> None:
        """Queue a write to a socket.

        The data is sent before any callback runs that is scheduled after this call.

        descriptor  descriptor of the socket if it may be sent to directly (socket_send.py), else -1
        """
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._run)
        self._queue.append((transport, data, descriptor))
        if len(self._queue) == WRITES_PER_TURN:
            self.budget_spent = True

    def call_after_flush(self, callback: Callable[[], None]) -> None:
        """Call a function once, after the next flush at the end of an event loop iteration.

        This costs less than the event loop's call_soon().
        """
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._run)
        self._callbacks.append(callback)

    def flush(self) -> None:
        """Send all queued writes now. Those to transports that have been closed are dropped."""
        queue, self._queue = self._queue, []
        for transport, data, descriptor in queue:
            if not transport.is_closing():  # the descriptor belongs to no other connection yet
                if descriptor >= 0 and not transport.get_write_buffer_size():
                    sent = send_now(descriptor, data)
                    if sent == len(data):
                        continue
                    data = data[sent:]
                try:
                    transport.write(data)
                except RuntimeError:  # half-closed: drop its data, but keep writing to the others
                    transport.abort()

    def defer(self, connection: DeferringConnection, relay: Relay, data: bytes) -> None:
        """Relay an engine's chunk in a later event loop iteration instead of now.

        Call this if `budget_spent` is true. Chunks that were deferred earlier come first.
        """
        self._deferred.append((connection, relay, data))
        self._deferred_bytes += len(data)
        while self._deferred_bytes > MAX_DEFERRED_BYTES or len(self._deferred) > MAX_DEFERRED:
            self._relay_deferred(1)
            self.budget_spent = True

    def flush_connection(self, connection: DeferringConnection) -> None:
        """Relay the deferred chunks of this connection now, because the connection is closing."""
        mine = [chunk for chunk in self._deferred if chunk[0] is connection]
        if mine:
            self._deferred = deque(chunk for chunk in self._deferred if chunk[0] is not connection)
            self._deferred_bytes -= sum(len(data) for _, _, data in mine)
            full = self.budget_spent
            for _, relay, data in mine:
                # Otherwise the connection would defer the chunk once more.
                self.budget_spent = False
                connection.process_deferred(relay, data)
            self.budget_spent = full

    def _run(self) -> None:
        # Reset the flags before the flush. The flush may trigger another write or raise an
        # exception, and the queue must be able to schedule itself afterwards.
        try:
            if self._deferred:
                self._run_deferred()
            else:
                self._is_scheduled = self.budget_spent = False
                self.request_turns.later_begun = 0
                self.flush()
        finally:
            if self._callbacks:
                callbacks, self._callbacks = self._callbacks, []
                for callback in callbacks:
                    callback()

    def _run_deferred(self) -> None:
        try:
            self.flush()
            self._relay_deferred(WRITES_PER_TURN)
        finally:
            self._is_scheduled = self.budget_spent = bool(self._deferred)
            if self._deferred:
                self.loop.call_soon(self._run)
            self.flush()

    def _relay_deferred(self, chunks: int) -> None:
        left = BYTES_PER_TURN
        for _ in range(min(chunks, len(self._deferred))):
            if left <= 0:
                return
            connection, relay, data = self._deferred.popleft()
            left -= len(data)
            self._deferred_bytes -= len(data)
            self.budget_spent = False  # otherwise the connection would defer the chunk once more
            connection.process_deferred(relay, data)
