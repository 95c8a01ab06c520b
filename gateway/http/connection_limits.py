"""Limits on the number of client connections of a process, and on their unread bytes.

Unread bytes are received but belong to no request yet, such as an incomplete request head. Their
clients have not been authenticated. The unread bytes of all connections together are limited to
`limits.unread_budget`, a part of `limits.body_budget`. Above this limit, the oldest unread bytes
are discarded: an honest client completes its request within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from random import uniform
from typing import TYPE_CHECKING, Protocol

from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.response.date_header import ResponseClock
from gateway.util.client_networks import Networks, client_group

if TYPE_CHECKING:
    from gateway.config import Limits

# A connection may hold one fourth of the limit on all unread bytes.
SHARES = 4

# Unread bytes that a connection may hold in any case: one read, and what the kernel buffers.
MIN_SHARE = 512 * 1024

ABORT_DELAY_S = 1.0, 3.0  # range of the time until a connection with dropped bytes ends
MAX_DELAYED_BYTES = 64 * 1024 * 1024  # maximum bytes in the kernel for all delayed connections

SWEPT_AT_ONCE = 512
"""Maximum number of connections whose deadlines one sweep checks; there are four sweeps per
second.
"""

ENDED_AT_ONCE = 2
"""Maximum number of connections that a sweep ends in one event loop iteration.

Answering a late client and closing its connection takes 0.2 to 0.3 ms.
"""


class ByteBudget(Protocol):
    """The interface of the memory budget for request bodies.

    admission/body_memory_budget.py implements it.
    """

    def reserve_body(self, body_bytes: int) -> int:
        """Reserve memory for a request body, and return the number of bytes that were reserved.

        Raises GatewayError if the budget is used up.
        """
        ...

    def release_body(self, body_bytes: int) -> None: ...


class CountedConnection(Protocol):
    """The interface of a client connection that counts against the limits on connections.

    It counts from the start of its TLS handshake, if it uses TLS.
    """

    def sweep(self, now: float) -> bool: ...
    def drop_unread(self) -> None: ...
    def abort(self) -> None: ...
    def drain(self) -> None: ...


class ClientConnections:
    """The open client connections and the number of unread bytes of each.

    clock        supplies the Date header line of responses
    on_refused   called with the name of the limit when a connection or its unread bytes are refused
    on_begun     called by each new connection
    """

    __slots__ = (
        "_budget",
        "_connections",
        "_delayed_bytes",
        "_per_client",
        "_to_sweep",
        "_trusted",
        "_unread",
        "clock",
        "on_begun",
        "on_refused",
        "unread_bytes",
    )

    def __init__(
        self, budget: ByteBudget, trusted: Networks, on_refused: Callable[[str], None]
    ) -> None:
        """Create an empty set of client connections.

        budget   the memory budget for request bodies
        trusted  addresses that are exempt from the limit on connections per client
        """
        self._budget = budget
        self._trusted = trusted
        self.on_refused = on_refused
        self.on_begun: Callable[[], None] = _do_nothing
        self._connections: dict[CountedConnection, str] = {}
        self._per_client: dict[str, int] = {}
        self._unread: OrderedDict[CountedConnection, int] = OrderedDict()
        self._to_sweep: list[CountedConnection] = []
        self.unread_bytes = self._delayed_bytes = 0
        self.clock = ResponseClock()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[CountedConnection]:
        return iter(self._connections)

    async def sweep(self, now: float) -> None:
        """Check the timeouts of the next SWEPT_AT_ONCE connections. Call this regularly.

        `now` is in monotonic seconds. A call checks only a part of the connections, so that it
        takes little time. With thousands of connections, a timeout may take effect a few seconds
        late. At most ENDED_AT_ONCE connections are ended in one event loop iteration.
        """
        if not self._to_sweep:
            self._to_sweep = list(self._connections)
        part = self._to_sweep[-SWEPT_AT_ONCE:]
        del self._to_sweep[-SWEPT_AT_ONCE:]
        ended = 0
        for connection in part:
            if connection in self._connections and connection.sweep(now):
                ended += 1
                if not ended % ENDED_AT_ONCE:
                    await asyncio.sleep(0)

    def admit(self, connection: CountedConnection, address: str, limits: Limits) -> bool:
        """Count a new connection; return False if that would exceed a limit.

        There are two limits: on all connections, and on those of one client address.
        """
        client = client_group(address)
        if len(self._connections) >= limits.connections:
            self.on_refused("connections")
            return False
        if (
            self._per_client.get(client, 0) >= limits.connections_per_address
            and address not in self._trusted
        ):
            self.on_refused("connections_per_address")
            return False
        self._connections[connection] = client
        self._per_client[client] = self._per_client.get(client, 0) + 1
        return True

    def replace(self, old: CountedConnection, new: CountedConnection) -> None:
        """Count `new` in place of `old`, another protocol object for the same TCP connection.

        The unread bytes of `old` are no longer counted; `new` reports its own with set_unread().
        """
        self._release(old)
        client = self._connections.pop(old, None)
        if client is not None:
            self._connections[new] = client

    def remove(self, connection: CountedConnection) -> None:
        """Stop counting a closed connection. Does nothing if it was not counted."""
        client = self._connections.pop(connection, None)
        if client is None:
            return
        self._release(connection)
        remaining = self._per_client[client] - 1
        if remaining:
            self._per_client[client] = remaining
        else:
            del self._per_client[client]

    def set_unread(self, connection: CountedConnection, unread: int, limit: int) -> None:
        """Set the number of a connection's bytes that belong to no request yet; apply the limit.

        Above the limit, the oldest unread bytes of all connections are dropped. A single
        connection may have a quarter of the limit, or MIN_SHARE if that is more.
        """
        if not unread:
            self._release(connection)
            return
        if unread > max(limit // SHARES, MIN_SHARE):
            self._drop(connection)
            return
        increase = unread - self._unread.get(connection, 0)
        try:
            if increase > 0:
                self._budget.reserve_body(increase)
            else:
                self._budget.release_body(-increase)
        except GatewayError:
            self._drop(connection)
            return
        self.unread_bytes += increase
        self._unread[connection] = unread
        while self.unread_bytes > limit and self._unread:
            self._drop(next(iter(self._unread)))

    def abort_later(self, connection: CountedConnection, kernel_bytes: int) -> None:
        """Abort a connection whose unread bytes were dropped, usually after a short random delay.

        The delay keeps its client from connecting again immediately. Hundreds of clients that do so
        would fill the queue of new connections, in which others wait.

        There is no delay if the delayed connections together may already hold MAX_DELAYED_BYTES in
        the kernel.

        kernel_bytes  bytes that the kernel may hold until the connection ends
        """
        if self._delayed_bytes + kernel_bytes > MAX_DELAYED_BYTES:
            connection.abort()
            return
        self._delayed_bytes += kernel_bytes
        asyncio.get_running_loop().call_later(
            uniform(*ABORT_DELAY_S), self._abort_delayed, connection, kernel_bytes
        )

    def _abort_delayed(self, connection: CountedConnection, kernel_bytes: int) -> None:
        self._delayed_bytes -= kernel_bytes
        connection.abort()

    def _release(self, connection: CountedConnection) -> None:
        # Set a connection's unread bytes to 0 and return them to the budget.
        unread = self._unread.pop(connection, 0)
        self.unread_bytes -= unread
        self._budget.release_body(unread)

    def _drop(self, connection: CountedConnection) -> None:
        self._release(connection)
        self.on_refused("unread_budget")
        connection.drop_unread()


def _do_nothing() -> None:
    pass


def unread_budget_error() -> GatewayError:
    """Return the error for a client whose unread bytes were dropped to save memory."""
    message = "Incomplete and pipelined requests take too much memory."
    return GatewayError(Failure.OVERLOADED, message, retry_after_s=1.0, reason="unread_budget")
