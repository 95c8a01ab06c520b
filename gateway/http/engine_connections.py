"""Connections to engines: an HTTP/1.1 client with a pool, timeouts and backpressure.

Its main classes are ConnectionPool and UpstreamConnection. Response bytes go straight to the
client's connection; a Relay (protocol/response/relay.py) parses them on the way. aiohttp's client
would take several times as much CPU time per request and chunk (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

from gateway.http.ack_delay import delay_acks
from gateway.http.burst_reads import BURST_GAP_S, READS_BEFORE_BURST
from gateway.http.connect_errors import connect_error_kind
from gateway.http.eager_task import EagerFuture, new_future
from gateway.http.engine_lookup_and_connect import EngineAddresses
from gateway.http.engine_request import RequestPayload, UpstreamTimeouts
from gateway.http.socket_send import descriptor_of
from gateway.http.upload_read_turns import LONG_READ
from gateway.http.write_queue import WriteQueue
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.relay_state import BEHIND, DONE
from gateway.util.tls_contexts import WRITE_BUFFER_BYTES, Encryption
from gateway.util.work_in_turns import Steps, slices

MAX_IDLE_S = 4.0  # below the 5 s after which vLLM's server closes idle connections
MAX_HEADS = 64  # cached beginnings of requests, one for each path
MAX_IDLE = 256  # idle connections kept per engine
SWEPT_AT_ONCE = 256  # connections whose timeouts one part of a sweep checks
TLS_SHUTDOWN_S = 1.0  # how long an engine may take to complete a TLS shutdown
# Bytes of a response that the kernel buffers while its client does not read; Linux allows MiBs.
RECEIVE_BUFFER = 256 * 1024
JOIN_LIMIT = 64 * 1024  # a longer body is cheaper to pass as a second buffer than to copy
# A body from this size on is sent in a callback of its own. Copying 4 MB to the socket takes 2 ms.
DEFER_LIMIT = 256 * 1024
LOST_KINDS = ("reset", "no_answer")  # kinds of failure in which no byte of a response arrived

# A connection lost later than this may be due to a proxy's idle timeout, not to a dead engine.
RECENT_S = 5.0

# How much _examine() does after a read: nothing; it continues work left from earlier reads; and it
# decides as well whether to delay ACKs.
NOTHING, STEPS, STEPS_AND_ACKS = range(3)


class Downstream(Protocol):
    """The interface of what receives an engine's response, usually a client's connection."""

    @property
    def is_writing_paused(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def set_source(self, source: UpstreamConnection | None) -> None: ...


class UpstreamConnection:
    """A connection to one engine, which carries one request and its response at a time.

    last_activity_at  monotonic time at which the client last received a part of the response; until
                      the first part, the time at which the connection was made or taken for it
    idle_since        monotonic time at which the newest response ended
    transport         None before the connection is established and after it is lost

    The class implements asyncio.Protocol without inheriting from it: with a Python base class it
    could not be compiled to a C class (tools/compile/extension_classes.py).
    """

    __slots__ = (
        *("_descriptor", "_done", "_downstream", "_examined", "_is_half_closed", "_long_read"),
        *("_outbox", "_paused", "_pool", "_quick_reads", "_relay", "idle_since"),
        *("last_activity_at", "transport"),
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._outbox: WriteQueue = pool.outbox
        self.transport: asyncio.Transport | None = None
        self._relay: Relay | None = None
        self._downstream: Downstream | None = None
        self._done: EagerFuture | None = None
        self.last_activity_at = 0.0
        self.idle_since = 0.0
        self._descriptor = -1  # descriptor of the socket, if bytes may be sent to it directly
        self._paused = self._is_half_closed = False
        self._long_read = LONG_READ  # bytes from which on a read is relayed in slices
        self._quick_reads = 0  # reads in a row, each shortly after the one before
        self._examined = STEPS_AND_ACKS

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def start(
        self, head: bytes, payload: RequestPayload, relay: Relay, downstream: Downstream
    ) -> EagerFuture:
        """Send a request to the engine on this connection, which was just taken or made.

        The returned future resolves when the response has been relayed, or raises UpstreamError
        when it fails.
        """
        done = self._done = new_future(self._outbox.loop)
        transport = self.transport
        if transport is None:
            message = "the connection was closed before the request was sent"
            self._finish(UpstreamError("reset", message))
            return done
        self._relay, self._downstream = relay, downstream
        self._examined, self._quick_reads = STEPS_AND_ACKS, 0
        downstream.set_source(self)
        body = payload.body
        if len(body) > JOIN_LIMIT:
            if len(body) < DEFER_LIMIT:
                transport.writelines((head, body))
            else:
                self._outbox.loop.call_soon(self._send_large, relay, head, body)
        else:
            self._outbox.enqueue(transport, head + body, self._descriptor)
        return done

    def _send_large(self, relay: Relay, head: bytes, body: bytes) -> None:
        if self._relay is relay and self.is_open and not self._is_half_closed:
            cast(asyncio.Transport, self.transport).writelines((head, body))

    def abort(self) -> None:
        """Close the connection immediately, so that the engine cancels the request."""
        if self._downstream is not None:
            self._downstream.set_source(None)
        self._relay = self._downstream = None
        if self.transport is not None:
            self.transport.abort()

    def half_close(self) -> None:
        """Half-close the connection: the engine cancels the request, but can end its response.

        A TLS connection cannot be half-closed. Its engine cancels the request only when the caller
        closes the connection.
        """
        self._outbox.flush()
        self._descriptor = -1
        self._is_half_closed = True
        if self.is_open and self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    @property
    def is_recently_started(self) -> bool:
        """Return whether the request was sent to the engine within the last RECENT_S seconds."""
        return monotonic() - self.last_activity_at < RECENT_S

    @property
    def is_mid_event(self) -> bool:
        """Return whether the client has received only a part of the current event or body."""
        return (
            self._relay is not None and self._relay.is_committed and not self._relay.is_at_boundary
        )

    def fail(self, kind: str, message: str) -> None:
        """End the current response with an error that the caller detected, such as a timeout."""
        self._finish(UpstreamError(kind, message), later=True)

    def pause(self) -> None:
        """Stop reading from the engine while the client reads too slowly.

        Unread data stays in the socket.
        """
        if self.is_open and self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.is_open and self.transport is not None and self._paused:
            self._paused = False
            self.last_activity_at = monotonic()
            outbox = self._outbox
            if not (outbox.long_reads.has_slices(self) or outbox.burst_reads.is_waiting(self)):
                self.transport.resume_reading()

    @property
    def is_awaited(self) -> bool:
        """Return whether a client waits for the engine's response and can receive it now."""
        return (
            self._relay is not None
            and self._downstream is not None
            and not self._downstream.is_writing_paused
        )

    def is_relaying(self, relay: Relay) -> bool:
        return self._relay is relay

    @property
    def active_stream(self) -> Relay | None:
        """Return the relay of a response that is streaming to a client that keeps up, else None."""
        relay = self._relay
        if relay is None or not self.is_awaited:
            return None
        return relay if relay.event_count and relay.first_token_at else None

    def has_timed_out(self, now: float, timeouts: UpstreamTimeouts) -> bool:
        """Return whether the engine has sent nothing for too long.

        The time during which reading was paused is not counted.
        """
        relay = self._relay
        if relay is None or not self.is_awaited:
            return False
        has_begun = relay.is_committed or relay.has_held_payload
        limit = timeouts.stall_s if has_begun else timeouts.first_byte_s
        return now - self.last_activity_at > limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop sets TCP_NODELAY on every TCP transport.
        self.transport = cast(asyncio.Transport, transport)
        self._descriptor = descriptor_of(transport)
        self.last_activity_at = monotonic()
        self._pool.connections.add(self)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET,
                socket.SO_RCVBUF,
                RECEIVE_BUFFER // 2,  # Linux doubles it
            )

    def pause_writing(self) -> None:
        """Do nothing, because the transport's buffer already has the whole request."""

    def resume_writing(self) -> None: ...

    def data_received(self, data: bytes) -> None:
        relay = self._relay
        if relay is None:  # unsolicited bytes: requests and responses no longer correspond
            self.abort()
            return
        if len(data) >= self._long_read and self.transport is not None:
            self._relay_in_slices(relay, data, self.transport)
            return
        if self._outbox.budget_spent:
            self._outbox.defer(self, relay, data)
            return
        now = monotonic()
        try:
            out = relay.feed(data, now)
        except UpstreamError as error:
            self._finish(error)
            return
        if out:
            if now - self.last_activity_at > BURST_GAP_S:
                self._quick_reads = 0
            else:
                self._quick_reads += 1
            self.last_activity_at = self._pool.last_body_at = now
            self._downstream.write(out)  # type: ignore[union-attr]  # set together with _relay
        elif relay.is_committed:  # else an engine could stay active by sending interim heads
            self.last_activity_at = now
        elif relay.has_held_payload:
            self.last_activity_at = self._pool.last_body_at = now
        if relay.state is DONE:
            self.idle_since = now
            self._finish(None)
        else:
            if self._examined:
                self._examine(relay)
            if self._quick_reads >= READS_BEFORE_BURST:
                self._wait_in_burst()

    def _wait_in_burst(self) -> None:
        self._quick_reads = 0
        # TLS would read on, and lose it if the engine disconnected. Long reads pause reading, too.
        if self._descriptor >= 0 and self._long_read == LONG_READ and self.is_open:
            self._outbox.burst_reads.add(self, cast(asyncio.Transport, self.transport))

    def end_burst(self) -> None:
        """Resume reading from the engine, unless the client reads too slowly."""
        if self.is_open and self.transport is not None and not self._paused:
            self.transport.resume_reading()

    def _examine(self, relay: Relay) -> None:
        if relay.state is BEHIND:
            self._outbox.long_reads.add_step(self, relay, self.transport)
            self._long_read = 0
        elif self._examined == STEPS_AND_ACKS and relay.event_count > 1:
            self._examined = NOTHING if relay.translator is None else STEPS
            delay_acks(self.transport)

    def _relay_in_slices(self, relay: Relay, data: bytes, transport: asyncio.Transport) -> None:
        if self._outbox.budget_spent:  # this connection's deferred chunks come first
            self._outbox.flush_connection(self)
        self._long_read = 0  # bytes read from now on are relayed after the last slice
        self._outbox.long_reads.add(self, relay, data, transport)

    def end_slices(self) -> None:
        """Resume reading from the engine, because all but one slice of a long read are relayed.

        Reading stays paused while the client reads too slowly.
        """
        self._long_read = LONG_READ
        if self.is_open and self.transport is not None and not self._paused:
            self.transport.resume_reading()

    def process_deferred(self, relay: Relay, data: bytes) -> None:
        """Relay a chunk or slice that was deferred to this iteration, unless the response ended."""
        if self._relay is not relay:  # the response has ended, so these bytes are surplus
            self.abort()
            return
        self._quick_reads = 0  # the time since the part before says nothing about the engine
        long_read = self._long_read
        if not long_read:  # relay this slice immediately
            self._long_read = 2 * LONG_READ
        try:
            self.data_received(data)
        except BaseException:
            # The event loop closes a connection whose data_received() raises, but not here.
            self.abort()
            raise
        finally:
            if self._long_read:  # otherwise another step must be processed before the next read
                self._long_read = long_read

    def eof_received(self) -> None:
        self._relay_what_was_read()
        relay = self._relay
        if relay is None or self._downstream is None or relay.state is DONE:
            return
        try:
            out = relay.eof()
        except UpstreamError as error:
            self._finish(error)
            return
        self._downstream.write(out)
        self._finish(None)

    def _relay_what_was_read(self) -> None:
        self._outbox.long_reads.flush(self)
        self._outbox.flush_connection(self)
        self._outbox.long_reads.flush(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay_what_was_read()
        self.transport = None
        self._pool.discard(self)
        relay = self._relay
        if relay is not None and self._downstream is not None and relay.lacks_only_its_end:
            self._downstream.write(relay.eof())
            self._finish(None)
            return
        message = f"the connection to the engine was lost: {exc or 'closed'}"
        self._finish(UpstreamError("reset", message))

    def _finish(self, error: UpstreamError | None, *, later: bool = False) -> None:
        # End the response; return the connection to the pool if it is reusable, else close it.
        #
        # The waiting caller resumes inside this call, or in a later loop iteration if `later` is
        # true. Callers that must first complete their own work pass `later`.
        relay, done = self._relay, self._done
        if done is None:
            return
        self._done = None
        transport = self.transport
        is_usable = not (self._is_half_closed or transport is None or transport.is_closing())
        if self._long_read != LONG_READ:  # the remaining slices are surplus bytes
            is_usable = False
        if error is None and is_usable and relay is not None and relay.is_connection_reusable:
            self._downstream.set_source(None)  # type: ignore[union-attr]  # set together with _relay
            self._relay = self._downstream = None
            if self._paused:  # the client was slow until the end; the next one may not be
                self.resume()
            self._pool.release(self)
        else:
            self.abort()
        if later:
            self._outbox.loop.call_soon(done.resolve, error)
        else:
            done.resolve(error)


class ConnectionPool:
    """A pool of connections to one engine.

    The newest idle connection is reused first, so that unneeded ones expire.

    addresses     the addresses of the engine's host
    last_body_at  monotonic time at which the engine last sent part of any response body
    """

    __slots__ = (
        *("_encryption", "_headers", "_heads", "_idle", "_netloc", "_request_line"),
        *("addresses", "connections", "last_body_at", "outbox", "timeouts"),
    )

    def __init__(
        self,
        url: str,
        key: str | None,
        timeouts: UpstreamTimeouts,
        outbox: WriteQueue,
        encryption: Encryption | None = None,
    ) -> None:
        """Create a pool without connecting. `key` is the engine's API key, if it needs one.

        Raises ValueError for an https:// URL without `encryption`.
        """
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        port = parts.port or (443 if is_https else 80)
        self.addresses = EngineAddresses(parts.hostname or "", port)
        self._netloc = parts.netloc.removesuffix(":443") if is_https else parts.netloc
        self._request_line = b"POST " + parts.path.rstrip("/").encode()
        self.outbox = outbox
        if is_https and encryption is None:
            raise ValueError(f"the engine URL {url} begins with https:// and needs TLS settings")
        self.reconfigure(key, timeouts, encryption)
        self.last_body_at = 0.0
        self.connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []

    def reconfigure(
        self,
        key: str | None,
        timeouts: UpstreamTimeouts,
        encryption: Encryption | None,
        rank: int | None = None,
    ) -> None:
        """Replace the connection settings for later requests; running requests keep theirs.

        encryption  TLS settings of new connections
        rank        the data-parallel rank that serves all requests; None: the engine chooses one
        """
        self._encryption = encryption
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        if rank is not None:
            authorization += f"x-data-parallel-rank: {rank}\r\n"
        self._headers = (
            f" HTTP/1.1\r\nhost: {self._netloc}\r\ncontent-type: application/json\r\n"
            f"accept: */*\r\naccept-encoding: identity\r\nuser-agent: penstock\r\n{authorization}"
        ).encode()
        self._heads: dict[str, bytes] = {}
        self.timeouts = timeouts

    def request_head(self, path: str) -> bytes:
        """Return the start of a POST request head for `path`, as bytes.

        The caller appends more header lines and the blank line.
        """
        head = self._heads.get(path)
        if head is None:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            head = self._heads[path] = self._request_line + path.encode() + self._headers
        return head

    async def send(
        self, head: bytes, payload: RequestPayload, relay: Relay, downstream: Downstream
    ) -> None:
        """Send one request and relay its response to `downstream`.

        If an idle connection turns out lost, another one is opened. Raises UpstreamError.
        """
        pooled, is_retry = self.take_idle(), False
        while True:
            connection = pooled or await (self._reconnect() if is_retry else self.connect())
            done = connection.start(head, payload, relay, downstream)
            try:
                return await done
            except UpstreamError as error:
                if not relay.is_untouched or error.kind not in LOST_KINDS:
                    raise
                if pooled is None:
                    error.was_new_connection = connection.is_recently_started
                    raise
                pooled, is_retry = None, True
            except asyncio.CancelledError:
                # Once `done` has a result, the connection may carry another request's response.
                if not done.done() or done.cancelled():
                    connection.abort()
                raise

    def take_idle(self) -> UpstreamConnection | None:
        """Take an idle connection from the pool; return None if there is none.

        The caller must use the connection at once, or abort it.
        """
        oldest = (now := monotonic()) - MAX_IDLE_S
        while self._idle:
            connection: UpstreamConnection = self._idle.pop()
            transport = connection.transport
            if (
                transport is not None
                and not transport.is_closing()
                and connection.idle_since > oldest
            ):
                connection.last_activity_at = now
                return connection
            connection.abort()
        return None

    async def _reconnect(self) -> UpstreamConnection:
        # Open a connection for a request that was already sent on a connection that was lost.
        #
        # A raised UpstreamError has `was_sent` set.
        try:
            return await self.connect()
        except UpstreamError as error:
            error.was_sent = True
            raise

    async def connect(self) -> UpstreamConnection:
        """Open a new connection. Raises UpstreamError when that fails or takes too long."""
        connection = UpstreamConnection(self)
        protocol = cast(asyncio.Protocol, connection)
        try:
            try:
                await self._open(protocol)
            except (asyncio.CancelledError, TimeoutError):
                # The socket may be connected already; uvloop would then not report its end.
                connection.abort()
                self.discard(connection)
                raise
        except TimeoutError:
            message = f"no connection within {self.timeouts.connect_s:g} s"
            raise UpstreamError("connect_timeout", message, was_sent=False) from None
        except OSError as error:
            kind = connect_error_kind(error)
            raise UpstreamError(kind, error.strerror or str(error), was_sent=False) from error
        return connection

    async def _open(self, protocol: asyncio.Protocol) -> None:
        encryption, addresses, within_s = self._encryption, self.addresses, self.timeouts.connect_s
        if encryption is None:
            await addresses.connect(lambda: protocol, within_s, within_s)
            return
        transport, _ = await addresses.connect(
            lambda: protocol,
            within_s,
            within_s,
            ssl=encryption.context,
            server_hostname=encryption.server_name or addresses.host,
            ssl_handshake_timeout=within_s,
            ssl_shutdown_timeout=TLS_SHUTDOWN_S,
        )
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    def release(self, connection: UpstreamConnection) -> None:
        """Return a connection to the pool, or close it if MAX_IDLE connections are idle."""
        if len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        self._idle.append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> Steps[None]:
        """Close idle connections that are too old and fail overdue responses, in parts.

        `now` is in monotonic seconds. Connections are closed before the engine would close them.
        """
        while self._idle and self._idle[0].idle_since < now - MAX_IDLE_S:
            self._idle.pop(0).abort()
        for part in slices(tuple(self.connections), SWEPT_AT_ONCE):
            for connection in part:
                if connection.has_timed_out(now, self.timeouts):
                    connection.fail("timeout", "the engine has been silent for too long")
            if len(part) == SWEPT_AT_ONCE:
                yield

    def silence_duration_s(self, now: float) -> float:
        """Return for how many seconds clients have waited without any output of the engine.

        The result is 0 if no client is waiting. Response heads do not count as output, because API
        servers send them before the engine sees the request.
        """
        waiting_since = inf
        for connection in self.connections:
            if connection.is_awaited:
                waiting_since = min(waiting_since, connection.last_activity_at)
                # Of thousands of streams, one of the first shows that the last output counts.
                if waiting_since <= self.last_body_at:
                    return max(0.0, now - self.last_body_at)
        return max(0.0, now - waiting_since)

    def fail_all(self, kind: str, message: str) -> None:
        """Fail all responses in progress, because the engine is known to have failed."""
        for connection in tuple(self.connections):
            connection.fail(kind, message)

    def fail_between_events(self, kind: str, message: str) -> int:
        """Fail all responses that are not in the middle of an event; return how many still run."""
        spared = [connection for connection in self.connections if connection.is_mid_event]
        for connection in self.connections.difference(spared):
            connection.fail(kind, message)
        return len(spared)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
