"""Begins the requests of new and of pipelining connections in turn, by their clients' addresses.

A thousand clients may connect and send a request at the same moment, or send further requests
before they have read the response. To begin all these requests takes a second. In turn, a client
with another address begins after a few of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

REQUESTS_PER_ITERATION = 2
"""Number of such requests that begin per event loop iteration, which takes about a millisecond."""


class WaitingConnection(Protocol):
    """The interface of a client connection with a received request that waits for its turn."""

    def begin_request(self) -> None:
        """Begin the first request that was received, unless the connection has closed."""
        ...


class RequestTurns:
    """The connections of one event loop with a request that waits for its turn.

    _waiting  queues of connections, by client address; the first address has the next turn
    _begun    number of requests that have begun in this event loop iteration
    """

    __slots__ = ("_begun", "_is_scheduled", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, deque[WaitingConnection]] = {}
        self._begun = 0
        self._is_scheduled = False

    def may_begin(self, connection: WaitingConnection, address: str) -> bool:
        """Return whether a request may begin now; if not, let it wait() for its turn."""
        if self._begun < REQUESTS_PER_ITERATION and address not in self._waiting:
            self._begun += 1
            self._schedule()
            return True
        self.wait(connection, address)
        return False

    def wait(self, connection: WaitingConnection, address: str) -> None:
        """Call `connection.begin_request()` in the turn of its client's address."""
        self._waiting.setdefault(address, deque()).append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        # Begin the next requests, one address after another.
        waiting = self._waiting
        chosen: list[WaitingConnection] = []
        while waiting and len(chosen) < REQUESTS_PER_ITERATION:
            address = next(iter(waiting))
            queue = waiting.pop(address)
            chosen.append(queue.popleft())
            if queue:
                waiting[address] = queue  # behind the other addresses
        self._begun = len(chosen)
        self._is_scheduled = False
        if chosen:
            self._schedule()
        for connection in chosen:
            connection.begin_request()
