"""The lean HTTP/1.1 client towards engines: pooled connections, bytes straight to the client's transport.

Lives here: connecting, pooling, sending, timing out, and backpressure. What the bytes mean is the Relay's business.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

import msgspec

from gateway.errand import Landing, landing, within
from gateway.outbox import Outbox
from gateway.relay import DONE, Relay, UpstreamBroke
from gateway.tls import WRITE_BUFFER_BYTES, Encryption

IDLE_S = 4.0  # below the 5 s after which vLLM's server closes idle connections (engines.md A.9)
MAX_IDLE = 256
CLOSE_S = 1.0  # for an engine to answer the end of a TLS connection
RECEIVE_BUFFER = 256 * 1024  # bytes that the kernel keeps of an answer whose client does not read, in place of MiBs
JOIN_LIMIT = 64 * 1024  # above it a second buffer costs less than a copy
LOST = ("reset", "no_answer")  # kinds of a connection that ended without a byte of an answer
FRESH_S = 5.0  # a connection lost later than this may be a proxy's idle timeout on a long silent answer
# Reasons of a failed connect that say nothing about the engine: descriptors, memory, ports, rights.
_OWN = "EMFILE ENFILE ENOBUFS ENOMEM EADDRNOTAVAIL EACCES EPERM EAGAIN"
OWN_ERRORS = frozenset(getattr(errno, name) for name in _OWN.split())
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)  # Linux's


class Downstream(Protocol):
    """Where an answer's bytes go: the client's connection."""

    @property
    def writing_paused(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def set_source(self, source: Connection | None) -> None: ...


class Payload(Protocol):
    """What is sent after the head. Its owner may let go of the bytes while the answer still flows."""

    @property
    def body(self) -> bytes: ...


class Patience(msgspec.Struct, frozen=True):
    """How long an engine may be silent, in seconds."""

    connect_s: float
    first_byte_s: float
    stall_s: float


class Connection:
    """One connection to one engine, carrying one answer at a time from the engine to a client.

    heard_at  when it last said something of an answer that the client has part of; else when it was asked

    Not derived from asyncio.Protocol: with a base in Python it could not be a C class (deploy/classes.py).
    """

    __slots__ = (
        *("_called_off", "_done", "_downstream", "_outbox", "_paused", "_pool", "_quick", "_relay"),
        *("heard_at", "idle_since", "transport"),
    )

    def __init__(self, pool: Upstream) -> None:
        self._pool = pool
        self._outbox: Outbox = pool.outbox
        self.transport: asyncio.Transport | None = None
        self._relay: Relay | None = None
        self._downstream: Downstream | None = None
        self._done: Landing | None = None
        self.heard_at = 0.0
        self.idle_since = 0.0
        self._paused = self._called_off = False
        self._quick = True  # what the engine says is acknowledged piece by piece

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def carry(self, head: bytes, payload: Payload, relay: Relay, downstream: Downstream) -> Landing:
        """Send a request; its answer flows until the future is done. The future may raise UpstreamBroke."""
        done = self._done = landing(self._outbox.loop)
        transport = self.transport
        if transport is None:
            self._finish(UpstreamBroke("reset", "the connection was closed before the request was sent"))
            return done
        self._relay, self._downstream = relay, downstream
        self._quick = True
        self.heard_at = monotonic()
        downstream.set_source(self)
        body = payload.body
        if len(body) > JOIN_LIMIT:
            transport.writelines((head, body))
        else:
            self._outbox.post(transport, head + body)
        return done

    def abort(self) -> None:
        """Close at once. Engines take it as the abort of the request (engines.md A.7)."""
        if self._downstream is not None:
            self._downstream.set_source(None)
        self._relay = self._downstream = None
        if self.transport is not None:
            self.transport.abort()

    def call_off(self) -> None:
        """Half-close: engines take it as the abort too, but an answer that is on its way already can still be read.

        TLS has no half-close here: the engine learns of the abort when the caller closes the connection.
        """
        self._outbox.flush()
        self._called_off = True  # nothing can be sent on it any more
        if self.open and self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    @property
    def is_fresh(self) -> bool:
        """Whether the request was sent on it a short time ago."""
        return monotonic() - self.heard_at < FRESH_S

    @property
    def midway(self) -> bool:
        """Whether the client has part of something that only the engine can end: an event, or an answer in one."""
        return self._relay is not None and self._relay.committed and not self._relay.at_seam

    def fail(self, kind: str, message: str) -> None:
        """End the answer under way with a reason, from outside: a deadline, an ejected endpoint."""
        self._finish(UpstreamBroke(kind, message), later=True)

    def pause(self) -> None:
        """The client reads more slowly than the engine writes: stop reading, so that the socket fills, not memory."""
        if self.open and self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.open and self.transport is not None and self._paused:
            self._paused = False
            self.heard_at = monotonic()
            self.transport.resume_reading()

    @property
    def owed(self) -> bool:
        """Whether somebody waits for the engine here, and not the engine for somebody."""
        return self._relay is not None and self._downstream is not None and not self._downstream.writing_paused

    def carries(self, relay: Relay) -> bool:
        return self._relay is relay

    @property
    def streaming(self) -> Relay | None:
        """The stream that makes tokens here and that its client reads; None if there is none."""
        relay = self._relay
        return relay if relay is not None and relay.events and relay.first_token_at and self.owed else None

    def overdue(self, now: float, patience: Patience) -> bool:
        """Whether the engine has been silent for too long. Silence we caused by pausing does not count."""
        relay = self._relay
        if relay is None or not self.owed:
            return False
        limit = patience.stall_s if relay.committed else patience.first_byte_s
        return now - self.heard_at > limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop sets TCP_NODELAY on every TCP transport
        self._pool.connections.add(self)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER // 2)

    def pause_writing(self) -> None:
        """The engine reads a request more slowly than it was written; all of that lies in the transport already."""

    def resume_writing(self) -> None: ...

    def data_received(self, data: bytes) -> None:
        relay = self._relay
        if relay is None:  # bytes nobody asked for: the connection is out of step
            self.abort()
            return
        if self._outbox.full:
            self._outbox.put_off(self, relay, data)
            return
        now = monotonic()
        try:
            out = relay.feed(data, now)
        except UpstreamBroke as error:
            self._finish(error)
            return
        if relay.committed:  # before that no byte counts: heads, interim ones above all, could go on for ever
            self.heard_at = now
        if out:
            self._pool.heard_at = now
            self._downstream.write(out)  # type: ignore[union-attr]  # set together with _relay
        if self._quick and relay.events > 1:
            self._acknowledge_later()
        if relay.state is DONE:
            self._finish(None)

    def _acknowledge_later(self) -> None:
        """A stream flows: one packet back for two of its chunks will do.

        Who only reads acknowledges every piece as soon as it is read, which is a tenth of what relaying it costs, and
        more at the engine. Linux waits for the second, or 40 ms, where it takes the two sides to converse (pingpong in
        its code). That is over after a silence of 40 ms, as before every first token, so it is asked for anew in each
        stream. An engine that leaves Nagle's algorithm on waits 40 ms too, once, which ends it.
        """
        self._quick = False
        if QUICKACK is not None and self.open and self.transport is not None:
            with suppress(OSError):  # a kernel that has no such option: one packet for each, then
                self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)

    def catch_up(self, relay: Relay, data: bytes) -> None:
        """What came for this relay and was put off."""
        if self._relay is not relay:  # over since, and these bytes were too many
            self.abort()
            return
        try:
            self.data_received(data)
        except BaseException:  # the event loop closes a connection whose data_received() fails; here nobody would
            self.abort()
            raise

    def eof_received(self) -> None:
        self._outbox.hurry(self)
        relay = self._relay
        if relay is None or self._downstream is None or relay.state is DONE:
            return
        try:
            out = relay.eof()
        except UpstreamBroke as error:
            self._finish(error)
            return
        self._downstream.write(out)
        self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._outbox.hurry(self)
        self.transport = None
        self._pool.forget(self)
        self._finish(UpstreamBroke("reset", f"the connection to the engine was lost: {exc or 'closed'}"))

    def _finish(self, error: UpstreamBroke | None, *, later: bool = False) -> None:
        """The answer is over: the connection goes back to the pool, or away if it cannot be trusted any more.

        Who waits for it goes on at once, or `later`, when the caller is through with whatever made it end the answer.
        """
        relay, done = self._relay, self._done
        if done is None:
            return
        self._done = None
        transport = self.transport
        is_usable = transport is not None and not transport.is_closing() and not self._called_off
        if error is None and is_usable and relay is not None and relay.reusable:
            self._downstream.set_source(None)  # type: ignore[union-attr]  # set together with _relay
            self._relay = self._downstream = None
            if self._paused:  # the client may have been slow to the end; the next one is not
                self.resume()
            self._pool.give_back(self)
        else:
            self.abort()
        if later:
            self._outbox.loop.call_soon(done.land, error)
        else:
            done.land(error)


def is_own_error(error: OSError) -> bool:
    """Whether a connect failed for a reason in this process or in name resolution, not at the engine."""
    return isinstance(error, socket.gaierror) or error.errno in OWN_ERRORS


class Upstream:
    """The connections to one engine. Idle ones are reused newest first, so that the rest can grow old and close.

    heard_at  when a byte of any answer's body last came from the engine, monotonic seconds
    """

    __slots__ = (
        *("_begin", "_encryption", "_head", "_host", "_idle", "_netloc", "_port", "connections", "heard_at"),
        *("outbox", "patience"),
    )

    def __init__(
        self, url: str, key: str | None, patience: Patience, outbox: Outbox, encryption: Encryption | None = None
    ) -> None:
        """`key` is the engine's own API key; the client's never travels further than the gateway.

        An https:// URL needs `encryption`; no connection is ever opened without it.
        """
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if is_https else 80)
        self._netloc = parts.netloc.removesuffix(":443") if is_https else parts.netloc
        self._begin = b"POST " + parts.path.rstrip("/").encode()
        self.outbox = outbox
        if is_https and encryption is None:
            raise ValueError(f"{url} needs TLS settings")
        self.become(key, patience, encryption)
        self.heard_at = 0.0
        self.connections: set[Connection] = set()
        self._idle: list[Connection] = []

    def become(self, key: str | None, patience: Patience, encryption: Encryption | None) -> None:
        """From the next request on, another key or patience; connections and answers under way go on.

        `encryption` holds for new connections.
        """
        self._encryption = encryption
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f" HTTP/1.1\r\nhost: {self._netloc}\r\ncontent-type: application/json\r\n"
            f"accept: */*\r\naccept-encoding: identity\r\nuser-agent: penstock\r\n{authorization}"
        ).encode()
        self.patience = patience

    def head(self, path: str) -> bytes:
        """The beginning of every request to this engine; the caller adds its own lines and the blank one."""
        return self._begin + path.encode() + self._head

    async def send(self, head: bytes, payload: Payload, relay: Relay, downstream: Downstream) -> None:
        """Send one request and relay its answer.

        A pooled connection that is lost before a byte of the answer is replaced by a new one, once.
        """
        pooled, again = self.pooled(), False
        while True:
            connection = pooled or await (self._connect_again() if again else self.connect())
            done = connection.carry(head, payload, relay, downstream)
            try:
                return await done
            except UpstreamBroke as error:
                if not relay.untouched or error.kind not in LOST:
                    raise
                if pooled is None:
                    error.fresh = connection.is_fresh
                    raise
                pooled, again = None, True
            except asyncio.CancelledError:
                if not done.done() or done.cancelled():  # otherwise the connection may carry another's answer already
                    connection.abort()
                raise

    def pooled(self) -> Connection | None:
        """A connection out of the pool, to be carried on or aborted; None: connect()."""
        oldest = monotonic() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if transport is not None and not transport.is_closing() and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect_again(self) -> Connection:
        """As connect(), for a request that was sent on a connection before."""
        try:
            return await self.connect()
        except UpstreamBroke as error:
            error.sent = True
            raise

    async def connect(self) -> Connection:
        """Open a new connection. Raises UpstreamBroke."""
        connection = Connection(self)
        protocol = cast(asyncio.Protocol, connection)
        try:
            async with within(self.patience.connect_s):
                try:
                    await self._open(protocol)
                except asyncio.CancelledError:  # it may stand already, and uvloop would tell nobody of its end
                    connection.abort()
                    self.forget(connection)
                    raise
        except TimeoutError:
            message = f"no connection within {self.patience.connect_s:g} s"
            raise UpstreamBroke("connect_timeout", message, sent=False) from None
        except OSError as error:
            kind = "connect_error" if is_own_error(error) else "connect_failed"
            raise UpstreamBroke(kind, error.strerror or str(error), sent=False) from error
        return connection

    async def _open(self, protocol: asyncio.Protocol) -> None:
        encryption, loop = self._encryption, self.outbox.loop
        if encryption is None:
            await loop.create_connection(lambda: protocol, self._host, self._port)
            return
        transport, _ = await loop.create_connection(
            lambda: protocol,
            self._host,
            self._port,
            ssl=encryption.context,
            server_hostname=encryption.server_name or self._host,
            ssl_handshake_timeout=self.patience.connect_s,
            ssl_shutdown_timeout=CLOSE_S,
        )
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close idle connections before the engine does, and end answers whose engine has fallen silent."""
        while self._idle and self._idle[0].idle_since < now - IDLE_S:
            self._idle.pop(0).abort()
        for connection in tuple(self.connections):
            if connection.overdue(now, self.patience):
                connection.fail("timeout", "the engine has been silent for too long")

    def silence_s(self, now: float) -> float:
        """How long the engine has owed everybody a byte; 0 when nobody waits for it.

        A head alone is no sign of life: API servers send it before their engine has looked at the request.
        """
        waiting_since = [connection.heard_at for connection in self.connections if connection.owed]
        return max(0.0, now - max(min(waiting_since), self.heard_at)) if waiting_since else 0.0

    def fail_all(self, kind: str, message: str) -> None:
        """The engine is known to be dead: nobody waits for it."""
        for connection in tuple(self.connections):
            connection.fail(kind, message)

    def fail_at_seams(self, kind: str, message: str) -> int:
        """As fail_all, but who is midway is spared: how many are."""
        spared = [connection for connection in self.connections if connection.midway]
        for connection in self.connections.difference(spared):
            connection.fail(kind, message)
        return len(spared)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
