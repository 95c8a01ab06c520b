"""Begins crowds of connections and requests fairly: client addresses take turns.

A thousand clients may connect and send a request at the same moment, or a client may send further
requests before it has read the response. To begin all of these takes a second. Because client
addresses take turns, a client with another address has to wait for only a few of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import chain
from typing import Protocol

from gateway.util.client_networks import client_group

log = logging.getLogger("penstock")

BEGINNINGS = 2
"""Number of waiting connections and requests that begin per event loop iteration.

Most of their work follows in later callbacks, so the time that begin() takes is no measure.
"""

LATER_BEGINNINGS = 32
"""Number of later requests of open connections that begin immediately per event loop iteration.

They take about 4 ms. Usual traffic stays below it, so that its requests never wait.
"""

MAX_SKIPPED = 32
"""Maximum number of waiting clients per event loop iteration that turn out to have left."""

MAX_HELD_BYTES = 4 * 1024 * 1024
"""Bytes of requests that may wait in memory here; further requests begin immediately."""


class Waiting(Protocol):
    """The interface of a new connection or a received request that waits for its turn."""

    def begin(self) -> bool:
        """Begin to serve this connection or request. Returns False if the client has left."""
        ...


class RequestTurns:
    """Decides when new connections and received requests begin, in turn by client address.

    There is one object per event loop.

    _waiting     by client address: what waits, each with the bytes that it holds in memory; the
                 first address has the next turn
    _held_bytes  sum of these bytes
    _begun       number of connections and requests that have begun in this event loop iteration
    later_begun  number of later requests on open connections that have begun without waiting since
                 the write queue last sent; the queue then sets it to 0
    """

    __slots__ = ("_begun", "_held_bytes", "_is_scheduled", "_loop", "_waiting", "later_begun")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, deque[tuple[Waiting, int]]] = {}
        self._held_bytes = self._begun = self.later_begun = 0
        self._is_scheduled = False

    def may_begin(self, address: str, size: int) -> bool:
        """Return whether a connection's first request may begin now, without a call of wait().

        size  number of bytes of the request that have been read
        """
        if self._begun < BEGINNINGS and client_group(address) not in self._waiting:
            self._begun += 1
            self._schedule()
            return True
        return self._held_bytes + size > MAX_HELD_BYTES

    def may_begin_later(self, address: str, size: int, weight: int = 1) -> bool:
        """Return whether a later request of a connection may begin now, without a call of wait().

        In most event loop iterations, few requests begin; then they are only counted.

        size    number of bytes of the request that have been read
        weight  for how many requests it counts
        """
        if self.later_begun < LATER_BEGINNINGS and (
            not self._waiting or client_group(address) not in self._waiting
        ):
            self.later_begun += weight
            return True
        return self._held_bytes + size > MAX_HELD_BYTES

    def wait(self, waiting: Waiting, address: str, held_bytes: int = 0) -> None:
        """Queue a connection or request; `waiting.begin()` is called in a later iteration.

        The turns of different clients alternate.

        held_bytes  bytes that it holds in memory meanwhile, if no other budget counts them
        """
        client = client_group(address)
        queue = self._waiting.get(client)
        if queue is None:
            queue = self._waiting[client] = deque()
        queue.append((waiting, held_bytes))
        self._held_bytes += held_bytes
        self._schedule()

    def begin_all(self) -> bool:
        """Begin all that wait now, because the gateway stops; return whether any waited."""
        queues, self._waiting, self._held_bytes = self._waiting, {}, 0
        for waiting, _ in chain.from_iterable(queues.values()):
            try:
                waiting.begin()
            except Exception:  # it must not keep the gateway from stopping
                log.exception("a connection or request could not begin")
        return bool(queues)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._begun = self.later_begun = skipped = 0
        try:
            while self._waiting and self._begun < BEGINNINGS and skipped < MAX_SKIPPED:
                if self._next().begin():
                    self._begun += 1
                else:
                    skipped += 1
        finally:  # an exception that one raises must not stop the others
            self._is_scheduled = bool(self._waiting or self._begun)
            if self._is_scheduled:
                self._loop.call_soon(self._run)

    def _next(self) -> Waiting:
        client = next(iter(self._waiting))
        queue = self._waiting.pop(client)
        waiting, held_bytes = queue.popleft()
        self._held_bytes -= held_bytes
        if queue:
            self._waiting[client] = queue  # behind the other addresses
        return waiting
