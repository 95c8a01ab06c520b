"""The client connections of a gateway: how many there may be, and how much they may have sent ahead.

Bytes that belong to no request yet (unfinished heads, pipelined requests) come from clients that have not shown a key.
All connections together share `limits.unread_budget` for them, which is part of `limits.body_budget`. When it is used
up, the connection whose such bytes began first loses them: a client that sends what it began is done in milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from gateway.answer import Failure, GatewayError
from gateway.networks import Networks, client_group

if TYPE_CHECKING:
    from gateway.config import Limits


MOST_SHARE = 4  # the limit of all unread bytes over that of one connection's
LEAST_SHARE = 512 * 1024  # bytes that a connection may have unread in any case: what a read and the kernel hold


class ByteBudget(Protocol):
    """Memory for bodies; gateway/gate.py has it. hold() raises GatewayError when there is none left."""

    def hold(self, body_bytes: int) -> int: ...
    def release(self, body_bytes: int) -> None: ...


class CountedConnection(Protocol):
    """A connection of a client: gateway/talk.py, or gateway/tls_listener.py during its handshake."""

    def sweep(self, now: float) -> None: ...
    def drop_unread(self) -> None: ...
    def drain(self) -> None: ...


class ClientConnections:
    """All open client connections, and the bytes that each has unread.

    on_refused  called with the reason when a connection, or what it sent, is refused
    """

    __slots__ = ("_budget", "_connections", "_per_client", "_trusted", "_unread", "on_refused", "unread_bytes")

    def __init__(self, budget: ByteBudget, trusted: Networks, on_refused: Callable[[str], None]) -> None:
        """No limit per client holds for the addresses in `trusted`."""
        self._budget = budget
        self._trusted = trusted
        self.on_refused = on_refused
        self._connections: dict[CountedConnection, str] = {}
        self._per_client: dict[str, int] = {}
        self._unread: OrderedDict[CountedConnection, int] = OrderedDict()
        self.unread_bytes = 0

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[CountedConnection]:
        return iter(self._connections)

    def admit(self, connection: CountedConnection, address: str, limits: Limits) -> bool:
        """Count a new connection, unless there are too many: of all, or of its client."""
        client = client_group(address)
        if len(self._connections) >= limits.connections:
            self.on_refused("connections")
            return False
        if self._per_client.get(client, 0) >= limits.connections_per_address and address not in self._trusted:
            self.on_refused("connections_per_address")
            return False
        self._connections[connection] = client
        self._per_client[client] = self._per_client.get(client, 0) + 1
        return True

    def replace(self, old: CountedConnection, new: CountedConnection) -> None:
        """The same connection goes on under another protocol, which counts its unread bytes itself."""
        self._release(old)
        client = self._connections.pop(old, None)
        if client is not None:
            self._connections[new] = client

    def remove(self, connection: CountedConnection) -> None:
        """The connection is closed. Nothing happens when it was not counted."""
        client = self._connections.pop(connection, None)
        if client is None:
            return
        self._release(connection)
        left = self._per_client[client] - 1
        if left:
            self._per_client[client] = left
        else:
            del self._per_client[client]

    def hold(self, connection: CountedConnection, unread: int, limit: int) -> None:
        """The connection has this many unread bytes now. Over `limit` of all, the oldest ones are dropped.

        A connection that has a quarter of it loses its own.
        """
        if not unread:
            self._release(connection)
            return
        if unread > max(limit // MOST_SHARE, LEAST_SHARE):
            self._drop(connection)
            return
        more = unread - self._unread.get(connection, 0)
        try:
            if more > 0:
                self._budget.hold(more)
            else:
                self._budget.release(-more)
        except GatewayError:
            self._drop(connection)
            return
        self.unread_bytes += more
        self._unread[connection] = unread
        while self.unread_bytes > limit and self._unread:
            self._drop(next(iter(self._unread)))

    def _release(self, connection: CountedConnection) -> None:
        """The connection has no unread bytes any more."""
        held = self._unread.pop(connection, 0)
        self.unread_bytes -= held
        self._budget.release(held)

    def _drop(self, connection: CountedConnection) -> None:
        self._release(connection)
        self.on_refused("unread_budget")
        connection.drop_unread()


def unread_too_large() -> GatewayError:
    """The refusal of a client whose unread bytes were dropped."""
    message = "Requests that are not whole yet, or not due, take too much memory."
    return GatewayError(Failure.OVERLOADED, message, retry_after_s=1.0, reason="unread_budget")
