"""Accepts the clients that connect at the same moment, and begins their connections in turn.

The event loop accepts one connection of a listening socket per iteration, and begins it
immediately. A client would wait there for hundreds of iterations behind others that have connected
before. Therefore, when connections come in successive iterations, all others in the socket's queue
are accepted as well. They wait for their turn as plain sockets: what their clients send stays in
the kernel, and there is no protocol object, no TLS handshake and no timeout yet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.http.client_connection import POLLRDHUP, is_pending
from gateway.http.connection_limits import ClientConnections
from gateway.http.eager_task import EagerTask

if TYPE_CHECKING:
    from gateway.config import Limits
    from gateway.http.write_queue import WriteQueue

log = logging.getLogger("penstock")

ACCEPTS = 128
"""Maximum number of waiting clients accepted per event loop iteration and listening socket.

Accepting them takes about a millisecond.
"""

ProtocolFactory = Callable[[], asyncio.Protocol]


class NewConnections:
    """Accepts API connections, and begins those that arrive together one after another.

    _recent  number of event loop iterations in which a further new connection counts as part of a
             crowd, so that all waiting connections are accepted
    """

    __slots__ = ("_connections", "_limits", "_loop", "_recent", "_turns")

    def __init__(
        self,
        outbox: WriteQueue,
        connections: ClientConnections,
        limits: Callable[[], Limits],
    ) -> None:
        # Initialize without connections; `limits` returns the limits currently in force.
        self._loop, self._turns = outbox.loop, outbox.request_turns
        self._connections = connections
        self._limits = limits
        self._recent = 0

    def wrap_factory(
        self, new_protocol: ProtocolFactory, listening: socket.socket
    ) -> ProtocolFactory:
        """Wrap a protocol factory, so that a crowd of waiting clients is accepted all at once.

        new_protocol  the server's protocol factory, which the returned one calls
        listening     the server's listening socket
        """

        def create() -> asyncio.Protocol:
            if self._recent:
                try:
                    self._accept_waiting(listening, new_protocol)
                except Exception:  # an error raised here would stop the listener
                    log.exception("accepting waiting clients failed")
            else:
                self._loop.call_soon(self._calm_down)
            self._recent = 2
            return new_protocol()

        return create

    def _calm_down(self) -> None:
        self._recent -= 1
        if self._recent:
            self._loop.call_soon(self._calm_down)

    def _accept_waiting(self, listening: socket.socket, new_protocol: ProtocolFactory) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, peer = listening.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                # The queue is empty, or too many files are open. Then the event loop, which accepts
                # the next connection, refuses it.
                return
            client = WaitingClient(self, accepted, new_protocol)
            if self._connections.admit(client, peer[0], self._limits()):
                self._turns.wait(client, peer[0])
            else:
                accepted.close()

    def begin(
        self, client: WaitingClient, accepted: socket.socket, new_protocol: ProtocolFactory
    ) -> None:
        """Create the transport and the protocol of a connection whose turn has come."""
        # Right before its connection_made(), which counts it as the protocol's.
        self._loop.call_soon(self._connections.remove, client)
        EagerTask(self._connect(accepted, new_protocol), _do_nothing).step()

    def remove(self, client: WaitingClient) -> None:
        """Stop counting an accepted connection that ended while it waited for its turn."""
        self._connections.remove(client)

    async def _connect(self, accepted: socket.socket, new_protocol: ProtocolFactory) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(new_protocol, accepted)
        except Exception:
            log.exception("a new connection could not begin")
            accepted.close()


class WaitingClient:
    """An accepted connection that waits for its turn; it counts against the limits on clients."""

    __slots__ = ("_accepted", "_new_protocol", "_owner")

    def __init__(
        self, owner: NewConnections, accepted: socket.socket, new_protocol: ProtocolFactory
    ) -> None:
        self._owner = owner
        self._new_protocol = new_protocol
        self._accepted: socket.socket | None = accepted

    def begin(self) -> bool:
        """Begin the connection, unless its client has left; return whether it did."""
        accepted = self._accepted
        if accepted is None:
            return False
        if is_pending(accepted, POLLRDHUP):
            self.abort()
            return False
        self._accepted = None
        self._owner.begin(self, accepted, self._new_protocol)
        return True

    def abort(self) -> None:
        """Close the accepted connection immediately, before its first request is read."""
        accepted, self._accepted = self._accepted, None
        if accepted is not None:
            accepted.close()
            self._owner.remove(self)

    def sweep(self, now: float) -> bool:
        """Return False and do nothing: what the client has sent has not been read yet."""
        return False

    def drop_unread(self) -> None:
        """Do nothing: nothing was read from the client yet, and the kernel has all unread bytes."""

    def drain(self) -> None:
        """Do nothing when the listener drains: the connection is served like a new one."""


def _do_nothing() -> None:
    pass
