"""Opens the listeners of the API and the admin server, with TLS if configured, and closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from time import monotonic

from aiohttp import web

from gateway.config import Limits, Listener, Listeners
from gateway.http.connection_accept import NewConnections
from gateway.http.listener_sockets import (
    ADMIN,
    ADMIN_RECEIVE_BUFFER,
    API,
    BACKLOG,
    SocketsByName,
    bind,
    limit_receive_buffers,
    limit_send_buffers,
    naming_config_key,
)
from gateway.http.tls_listener import ProtocolFactory, TlsListeners
from gateway.util.urls import http_url


class OpenListeners:
    """Opens the listeners of a gateway, and closes them when it stops.

    sockets       listening sockets by listener name; at first, those inherited from another process
    tls           certificates of the listeners that use TLS
    accepted      spreads the start of new API connections over event loop iterations
    limits        returns the limits of the running configuration
    """

    def __init__(
        self,
        sockets: SocketsByName,
        tls: TlsListeners,
        accepted: NewConnections,
        limits: Callable[[], Limits],
    ) -> None:
        self.sockets = dict(sockets)
        self._tls, self._accepted, self._limits = tls, accepted, limits
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._runners: list[web.AppRunner] = []

    async def add_runner(self, runner: web.AppRunner) -> web.Server:
        """Start an aiohttp application that does not listen itself.

        Returns the factory that creates its connections, for a listener of this object. close()
        ends the application.
        """
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None
        return runner.server

    async def open(self, name: str, listener: Listener, factory: ProtocolFactory) -> str:
        """Listen on inherited sockets or on new ones, and return the listener's URL.

        Raises OSError, with the listener's configuration key, if an address is in use.
        """
        with naming_config_key(f"listeners.{name}", listener.host, listener.port):
            factory = self._tls.wrap_factory(name, listener.tls, factory)
            sockets = self.sockets.get(name) or bind(listener.host, listener.port)
            self.sockets[name] = sockets
            self._limit_buffers(name)
            wrap = self._accepted.wrap_factory if name == API else lambda factory, _: factory
            loop = asyncio.get_running_loop()
            self._servers[name] = [
                await loop.create_server(wrap(factory, own), sock=own, backlog=BACKLOG)
                for own in sockets
            ]
        port = sockets[0].getsockname()[1]
        return http_url(listener.host, port, encrypted=listener.tls is not None)

    def _limit_buffers(self, name: str) -> None:
        limits, sockets = self._limits(), self.sockets.get(name, ())
        limit_send_buffers(sockets, limits.send_buffer)
        receive_bytes = ADMIN_RECEIVE_BUFFER if name == ADMIN else limits.receive_buffer
        limit_receive_buffers(sockets, receive_bytes)

    def configure(self, listeners: Listeners) -> None:
        """Apply a changed configuration: certificates, and buffer sizes of new connections."""
        self._tls.update(listeners)
        for name in self.sockets:
            self._limit_buffers(name)

    def stop_accepting(self, names: Iterable[str] = (API, ADMIN)) -> None:
        """Close the listening sockets of the named listeners; open connections stay open."""
        for server in chain.from_iterable(self._servers.get(name, ()) for name in names):
            server.close()

    def abort_handshakes(self) -> None:
        """Close all client connections whose TLS handshake is not complete."""
        self._tls.close()

    async def close(self, timeout_s: float) -> None:
        """Stop accepting, and end the aiohttp applications within `timeout_s` seconds."""
        ends = monotonic() + timeout_s
        self.stop_accepting([ADMIN])
        for runner in self._runners:
            if runner.server is not None:
                runner.server.pre_shutdown()
                await runner.server.shutdown(max(0.0, ends - monotonic()))
            await runner.cleanup()
