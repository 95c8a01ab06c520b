"""Relays long reads from engines in slices of about a millisecond per event loop iteration.

The event loop reads up to 256 KiB from a connection at once. Relaying them may take several
milliseconds, for example if they contain thousands of small chunks. Nothing else would run
meanwhile. Therefore they are relayed in slices, and the connection is not read until the last
slice.

A short read may cause long work too, for example at the end of a translated stream. A relay does
such work in steps, and each step counts as a slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from gateway.protocol.response.stepwise_output import STEP_BYTES

if TYPE_CHECKING:
    from gateway.protocol.response.relay import Relay

SLICE = STEP_BYTES
"""Maximum bytes of a long read that are relayed at once; this takes a millisecond at most."""
ITERATION_S = 0.0005
"""Duration of an event loop iteration, in seconds, after which it relays no further slice."""


class SlicedConnection(Protocol):
    """The interface of a connection to an engine, whose long reads are relayed in slices."""

    def process_deferred(self, relay: Relay, data: bytes) -> None: ...
    def end_slices(self) -> None: ...


class LongReads:
    """The long reads of one event loop, which are relayed in slices.

    The connections take turns, so that one with a long read does not delay the others.
    """

    __slots__ = ("_is_scheduled", "_loop", "_slices")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_scheduled = False
        self._slices: dict[SlicedConnection, deque[tuple[Relay, bytes]]] = {}

    def has_slices(self, connection: SlicedConnection) -> bool:
        """Return whether a long read of this connection is still being relayed."""
        return connection in self._slices

    def add(
        self,
        connection: SlicedConnection,
        relay: Relay,
        data: bytes,
        transport: asyncio.Transport,
    ) -> None:
        """Relay `data` of a long read in slices, after the data added earlier for this connection.

        Reading from `transport` is paused until the last slice.
        """
        self._schedule()
        transport.pause_reading()
        slices = self._slices.setdefault(connection, deque())
        slices.extend((relay, data[at : at + SLICE]) for at in range(0, len(data), SLICE))

    def add_step(
        self, connection: SlicedConnection, relay: Relay, transport: asyncio.Transport | None
    ) -> None:
        """Let `relay` process the bytes that it has received, before it gets any more slices.

        Meanwhile, reading from `transport`, the connection's transport, is paused, unless it is
        closing or None.
        """
        self._schedule()
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
        self._slices.setdefault(connection, deque()).appendleft((relay, b""))

    def flush(self, connection: SlicedConnection) -> None:
        """Relay all remaining slices of a connection now, because it is closing."""
        while connection in self._slices:
            slices = self._slices[connection]
            relay, data = slices.popleft()
            if not slices:
                del self._slices[connection]
            connection.process_deferred(relay, data)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        ends = monotonic() + ITERATION_S
        try:
            while self._slices:
                self._relay_next()
                if monotonic() >= ends:
                    break
        finally:
            self._is_scheduled = False
            if self._slices:
                self._schedule()

    def _relay_next(self) -> None:
        connection = next(iter(self._slices))
        slices = self._slices.pop(connection)
        relay, data = slices.popleft()
        if slices:  # more slices are left: put the connection at the end of the queue
            self._slices[connection] = slices
        else:
            connection.end_slices()
        connection.process_deferred(relay, data)
