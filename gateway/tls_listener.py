"""TLS on a listener: each accepted connection completes its handshake here, then its HTTP protocol takes over.

The listener itself accepts plain connections, so that a handshake counts against the limit of connections, and a new
certificate serves the next connection while open ones go on with theirs. Plain listeners do not come by here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Protocol, cast

from gateway import tls
from gateway.errand import Errand
from gateway.restart.sockets import API

if TYPE_CHECKING:
    from gateway.config import Limits, Listeners, ListenerTls
    from gateway.connections import ClientConnections
    from gateway.observe.inside import Inside

log = logging.getLogger("penstock")


Accept = Callable[[], asyncio.Protocol]

MAX_HANDSHAKES = 4096
"""Handshakes under way on one listener: about 100 KiB each while they last."""


class Counter(Protocol):
    """Counts handshakes as connections of clients."""

    def admit(self, handshake: Handshake, address: str) -> bool: ...
    def remove(self, handshake: Handshake) -> None: ...


class TlsListener:
    """The certificates of one listener, and the connections whose handshake is under way.

    make        makes the HTTP protocol of a connection
    close_s     time for a client to read the rest of an answer once its connection is closing
    on_failure  called for each handshake that failed
    counter     counts handshakes as connections of clients; none for the admin server
    """

    def __init__(
        self,
        section: ListenerTls,
        make: Accept,
        close_s: float,
        on_failure: Callable[[], None],
        counter: Counter | None = None,
    ) -> None:
        """Raises OSError or ValueError when a file cannot be used."""
        self._make = make
        self._on_failure = on_failure
        self._counter = counter
        self._close_s = close_s
        self._handshakes: set[Handshake] = set()
        self._use(section)

    def _use(self, section: ListenerTls) -> None:
        settings = section.settings
        stamp = settings, tls.stamp_of(settings)
        context, times = (
            tls.server_context(settings),
            [tls.valid_times(pair) for pair in settings.pairs],
        )
        doubts = [each.doubt(time()) for each in times]
        self._stamp, self._context, self._handshake_s = stamp, context, section.handshake_timeout
        self.not_after = min(each.not_after for each in times)
        for pair, doubt in zip(settings.pairs, doubts, strict=True):
            if doubt is not None:
                log.warning("TLS: the certificate %s %s", pair.certificate, doubt)

    def follow(self, section: ListenerTls | None) -> None:
        """Use the section and its files, as they are now, for new connections.

        The old ones stay if a file fails, or if the new certificate has expired and the one in use has not.
        """
        if section is None or (section.settings, tls.stamp_of(section.settings)) == self._stamp:
            return
        try:
            if section.settings == self._stamp[0] and self.not_after > time() >= _not_after(
                section.settings
            ):
                raise ValueError("it has expired")
            self._use(section)
        except (OSError, ValueError) as error:
            log.error(
                "TLS: %s cannot be used, the certificate in use stays: %s",
                section.certificate,
                error,
            )
        else:
            log.info("TLS: new connections use %s as it is now", section.certificate)

    def accept(self) -> asyncio.Protocol:
        """The protocol of a connection that was just accepted."""
        return Handshake(self)

    def close(self) -> None:
        """Cut the connections whose handshake is under way."""
        for each in tuple(self._handshakes):
            each.cut()

    def begin(self, handshake: Handshake, address: str) -> bool:
        """Count a handshake; False when there are too many, or too many connections."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            return False
        if self._counter is not None and not self._counter.admit(handshake, address):
            return False
        self._handshakes.add(handshake)
        return True

    def end(self, handshake: Handshake) -> None:
        """Stop counting a handshake: it has succeeded or failed."""
        if handshake in self._handshakes:
            self._handshakes.discard(handshake)
            if self._counter is not None:
                self._counter.remove(handshake)

    async def encrypt(
        self, raw: asyncio.Transport, first: asyncio.Protocol
    ) -> asyncio.Transport | None:
        """The encrypted transport after the handshake; None when it failed. Its time is limited."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.start_tls(
                raw,
                first,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._close_s,
            )
        except (
            OSError,
            EOFError,
        ) as error:  # TimeoutError, ConnectionError and ssl.SSLError are among them
            self._on_failure()
            log.debug("TLS: a handshake failed: %s", error)
            return None

    def protocol(self) -> asyncio.Protocol:
        """A new HTTP protocol."""
        return self._make()


class TlsListeners:
    """The listeners of a gateway that have TLS, by name. Handshakes at the API count as connections of clients."""

    def __init__(
        self, metrics: Inside, connections: ClientConnections, limits: Callable[[], Limits]
    ) -> None:
        """`limits` gives those in force."""
        self._metrics = metrics
        self._connections = connections
        self._limits = limits
        self._listeners: dict[str, TlsListener] = {}

    def wrap(self, name: str, section: ListenerTls | None, make: Accept) -> Accept:
        """What makes a protocol for each new connection: `make` itself without TLS. Raises OSError, ValueError."""
        if section is None:
            return make
        failures = self._metrics.tls_handshake_failures_total.labels(name)
        counter = self if name == API else None
        listener = TlsListener(section, make, self._limits().slow_reader, failures.inc, counter)
        self._metrics.tls_not_after.labels(name).follow(lambda: listener.not_after)
        self._listeners[name] = listener
        return listener.accept

    def follow(self, listeners: Listeners) -> None:
        """A configuration has come into force: use its files, as they are now, for new connections."""
        for name, listener in self._listeners.items():
            listener.follow(listeners.api.tls if name == API else listeners.admin.tls)

    def close(self) -> None:
        """Cut the connections whose handshake is under way."""
        for listener in self._listeners.values():
            listener.close()

    def admit(self, handshake: Handshake, address: str) -> bool:
        """Count a handshake; False when there are too many connections, or too many of its address."""
        return self._connections.admit(handshake, address, self._limits())

    def remove(self, handshake: Handshake) -> None:
        """The handshake is over: its HTTP protocol counts the connection, or it is closed."""
        self._connections.remove(handshake)


class Handshake(asyncio.Protocol):
    """A connection during its handshake. Keeps what the client sends with the end of it for the HTTP protocol."""

    __slots__ = ("_early", "_errand", "_listener", "_raw")

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener
        self._early: list[bytes] = []
        self._raw: asyncio.Transport | None = None
        self._errand: Errand | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = self._raw = cast(asyncio.Transport, transport)
        peer = raw.get_extra_info("peername")
        if not self._listener.begin(self, peer[0] if isinstance(peer, tuple) else ""):
            raw.abort()
            return
        # The first step must be taken in this callback: after it the event loop reads from the connection.
        self._errand = Errand(self._run(raw), self._ended)
        self._errand.step()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def sweep(self, now: float) -> None:
        """The handshake has a timer of its own."""

    def drop_unread(self) -> None:
        """Nothing is unread before the end of the handshake."""

    def drain(self) -> None:
        """The client has asked nothing yet: its connection is served like one that is accepted now."""

    def cut(self) -> None:
        """Close at once."""
        if self._raw is not None:
            self._raw.abort()

    async def _run(self, raw: asyncio.Transport) -> None:
        transport = await self._listener.encrypt(raw, self)
        if transport is None or transport.is_closing():
            raw.abort()
            return
        transport.set_write_buffer_limits(tls.WRITE_BUFFER_BYTES)
        protocol = self._listener.protocol()
        transport.set_protocol(protocol)
        self._listener.end(self)  # from here on the protocol counts the connection
        protocol.connection_made(transport)
        if self._early and not transport.is_closing():
            protocol.data_received(b"".join(self._early))

    def _ended(self) -> None:
        self._listener.end(self)
        self._early.clear()
        self._errand = self._raw = None


def _not_after(settings: tls.ServerSettings) -> float:
    """When the first of the certificates expires."""
    return min(tls.valid_times(pair).not_after for pair in settings.pairs)
