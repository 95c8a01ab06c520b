"""TLS for a listener: performs the handshake, then passes the connection to its HTTP protocol.

The listening socket accepts plain TCP connections. Therefore a handshake counts against the
connection limit, and a new certificate applies to later connections without affecting open ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING, Protocol, cast

from gateway.http.eager_task import EagerTask
from gateway.http.listener_sockets import API
from gateway.util.certificate_files import certificate_validity
from gateway.util.tls_contexts import (
    WRITE_BUFFER_BYTES,
    ServerSettings,
    files_stamp,
    server_context,
)

if TYPE_CHECKING:
    from gateway.config import Limits, Listeners, ListenerTls
    from gateway.http.connection_limits import ClientConnections
    from gateway.metrics.runtime_gauges import RuntimeGauges

log = logging.getLogger("penstock")


ProtocolFactory = Callable[[], asyncio.Protocol]

FAILURE_LOG_S = 20.0
"""Seconds between two log lines about failed handshakes of one listener."""

MAX_HANDSHAKES = 4096
"""Maximum number of concurrent handshakes on one listener; each takes about 100 KiB."""


class HandshakeLimit(Protocol):
    """The interface of a limit on client connections, which counts TLS handshakes too."""

    def admit(self, handshake: Handshake, address: str) -> bool: ...
    def remove(self, handshake: Handshake) -> None: ...


class TlsListener:
    """One listener that uses TLS: its certificates, and its connections in their TLS handshake.

    new_protocol     creates the HTTP protocol of a connection
    close_s          seconds that a client has to read the rest of a response before the connection
                     is closed
    on_failure       called for each failed handshake
    handshake_limit  counts handshakes as client connections; None for the admin server
    """

    def __init__(
        self,
        section: ListenerTls,
        new_protocol: ProtocolFactory,
        close_s: float,
        on_failure: Callable[[], None],
        handshake_limit: HandshakeLimit | None = None,
    ) -> None:
        """Create a TLS listener, and load its certificates.

        Raises OSError or ValueError if a file cannot be used.
        """
        self._new_protocol = new_protocol
        self._on_failure = on_failure
        self._counter = handshake_limit
        self._close_s = close_s
        self._handshakes: set[Handshake] = set()
        self._next_failure_log, self._unlogged_failures = 0.0, 0
        self._load(section)

    def _load(self, section: ListenerTls) -> None:
        settings = section.settings
        stamp = settings, files_stamp(settings)
        context = server_context(settings)
        periods = [certificate_validity(pair) for pair in settings.key_pairs]
        doubts = [period.refusal_reason(time()) for period in periods]
        self._stamp, self._context, self._handshake_s = stamp, context, section.handshake_timeout
        self.not_after = min(period.not_after for period in periods)
        for pair, doubt in zip(settings.key_pairs, doubts, strict=True):
            if doubt is not None:
                log.warning("TLS: the certificate %s %s", pair.certificate, doubt)

    def update(self, section: ListenerTls | None) -> None:
        """Use new TLS settings, and the current content of their files, for new connections.

        The current certificate stays in use if a file cannot be used, or if the new certificate has
        expired and the current one has not.
        """
        if section is None or (section.settings, files_stamp(section.settings)) == self._stamp:
            return
        settings, path = section.settings, section.certificate
        try:
            if settings == self._stamp[0] and self.not_after > time() >= _not_after(settings):
                raise ValueError("the new certificate has expired, but the current one has not")
            self._load(section)
        except (OSError, ValueError) as error:
            log.error("TLS: %s cannot be used, so the certificate in use is kept: %s", path, error)
        else:
            log.info("TLS: new connections use the current content of %s", path)

    def new_handshake(self) -> asyncio.Protocol:
        """Create the protocol object for a connection that was just accepted."""
        return Handshake(self)

    def close(self) -> None:
        """Abort the connections of this listener that are still in their TLS handshake."""
        for handshake in tuple(self._handshakes):
            handshake.abort()

    def admit_handshake(self, handshake: Handshake, address: str) -> bool:
        """Count a new handshake; return False if that would exceed a limit.

        There are limits on handshakes and on connections.
        """
        if len(self._handshakes) >= MAX_HANDSHAKES:
            return False
        if self._counter is not None and not self._counter.admit(handshake, address):
            return False
        self._handshakes.add(handshake)
        return True

    def remove_handshake(self, handshake: Handshake) -> None:
        """Stop counting `handshake` among the open TLS handshakes: it has succeeded or failed."""
        if handshake in self._handshakes:
            self._handshakes.discard(handshake)
            if self._counter is not None:
                self._counter.remove(handshake)

    async def start_tls(
        self, raw: asyncio.Transport, protocol: asyncio.Protocol
    ) -> asyncio.Transport | None:
        """Perform the TLS handshake; return the encrypted transport, or None if it fails."""
        loop = asyncio.get_running_loop()
        address = _address(raw)  # read the address now, because a closed transport no longer has it
        try:
            return await loop.start_tls(
                raw,
                protocol,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._close_s,
            )
        # TimeoutError, ConnectionError and ssl.SSLError are subclasses of OSError.
        except (OSError, EOFError) as error:
            self._on_failure()
            self._log_failure(address, error)
            return None

    def _log_failure(self, address: str, error: Exception) -> None:
        # Log at most one failure per period, so that a port scan cannot fill the disk. A balancer's
        # TCP check, which closes the connection without a word, is not worth a line.
        now = monotonic()
        if isinstance(error, EOFError | ConnectionError):
            log.debug("TLS: the handshake of %s failed: %s", address, error)
            return
        if now < self._next_failure_log:
            self._unlogged_failures += 1
            return
        more = f" ({self._unlogged_failures} more before it)" if self._unlogged_failures else ""
        log.warning("TLS: the handshake of %s failed: %s%s", address, error, more)
        self._next_failure_log, self._unlogged_failures = now + FAILURE_LOG_S, 0

    def new_protocol(self) -> asyncio.Protocol:
        """Create the HTTP protocol object for a connection whose handshake has succeeded."""
        return self._new_protocol()


class TlsListeners:
    """The gateway's listeners that use TLS, by name.

    Handshakes of the API listener count as client connections; those of the admin listener do not.
    """

    def __init__(
        self, metrics: RuntimeGauges, connections: ClientConnections, limits: Callable[[], Limits]
    ) -> None:
        # Initialize without listeners; `limits` returns the limits currently in force.
        self._metrics = metrics
        self._connections = connections
        self._limits = limits
        self._listeners: dict[str, TlsListener] = {}

    def wrap_factory(
        self, name: str, section: ListenerTls | None, new_protocol: ProtocolFactory
    ) -> ProtocolFactory:
        """Return the protocol factory of a listener, which performs TLS if `section` is not None.

        Without TLS, this is `new_protocol` itself. Raises OSError or ValueError if a certificate
        file cannot be used.
        """
        if section is None:
            return new_protocol
        failures = self._metrics.tls_handshake_failures_total.labels(name)
        counter = self if name == API else None
        listener = TlsListener(
            section, new_protocol, self._limits().slow_reader, failures.inc, counter
        )
        self._metrics.tls_not_after.labels(name).set_function(lambda: listener.not_after)
        self._listeners[name] = listener
        return listener.new_handshake

    def update(self, listeners: Listeners) -> None:
        """Apply a new configuration and the current certificate files to new TLS connections."""
        for name, listener in self._listeners.items():
            listener.update(listeners.api.tls if name == API else listeners.admin.tls)

    def close(self) -> None:
        """Abort the connections of all listeners that are in their TLS handshake."""
        for listener in self._listeners.values():
            listener.close()

    def admit(self, handshake: Handshake, address: str) -> bool:
        """Count a TLS handshake as a client connection.

        Returns False if the connection limit is reached.
        """
        return self._connections.admit(handshake, address, self._limits())

    def remove(self, handshake: Handshake) -> None:
        """Stop counting a TLS handshake: it has failed, or its HTTP protocol is counted now."""
        self._connections.remove(handshake)


class Handshake(asyncio.Protocol):
    """The asyncio protocol of a connection during its TLS handshake.

    It buffers received data for the HTTP protocol.
    """

    __slots__ = ("_early_data", "_listener", "_raw", "_task")

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener
        self._early_data: list[bytes] = []
        self._raw: asyncio.Transport | None = None
        self._task: EagerTask | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = self._raw = cast(asyncio.Transport, transport)
        if not self._listener.admit_handshake(self, _address(raw)):
            raw.abort()
            return
        # start_tls() must be called in this callback; after it the loop reads from the connection.
        self._task = EagerTask(self._run(raw), self._on_done)
        self._task.step()

    def data_received(self, data: bytes) -> None:
        self._early_data.append(data)

    def sweep(self, now: float) -> bool:
        """Return False and do nothing, because the handshake has its own timeout in start_tls()."""
        return False

    def drop_unread(self) -> None:
        """Do nothing, because there are no unread bytes before the end of the handshake."""

    def drain(self) -> None:
        """Do nothing when the listener drains.

        The connection is still in its TLS handshake. Afterwards it is served like a new one.
        """

    def abort(self) -> None:
        """Close the connection immediately, without completing the TLS handshake."""
        if self._raw is not None:
            self._raw.abort()

    async def _run(self, raw: asyncio.Transport) -> None:
        transport = await self._listener.start_tls(raw, self)
        if transport is None or transport.is_closing():
            raw.abort()
            return
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        protocol = self._listener.new_protocol()
        transport.set_protocol(protocol)
        self._listener.remove_handshake(self)  # the HTTP protocol counts the connection from now on
        protocol.connection_made(transport)
        if self._early_data and not transport.is_closing():
            protocol.data_received(b"".join(self._early_data))

    def _on_done(self) -> None:
        self._listener.remove_handshake(self)
        self._early_data.clear()
        self._task = self._raw = None


def _address(transport: asyncio.Transport) -> str:
    # Return the client's IP address; "" for a Unix socket.
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _not_after(settings: ServerSettings) -> float:
    return min(certificate_validity(pair).not_after for pair in settings.key_pairs)
