"""A TCP relay through which KV transfers pass, so that faults can be injected into the bytes.

It can flip a byte, or cut, repeat or stall the stream. It does not parse the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mockgpu.fault_grammar import FaultKind, InjectedFault


class FaultyRelay:
    """A TCP relay in front of a KV transfer agent, which injects a fault into the bytes."""

    def __init__(self, host: str) -> None:
        self.fault: InjectedFault | None = None
        self.port = 0
        self._host = host
        self._target = ("", 0)
        self._server: asyncio.Server | None = None
        self._ends: set[RelayConnection] = set()

    async def start(self, host: str, port: int) -> None:
        """Start to listen, and relay all bytes to the KV transfer agent at this address.

        Raises OSError if no port is free.
        """
        self._target = (host, port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: RelayConnection(self, self._dial), self._host, self.port
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in list(self._ends):
            end.abort()

    def set(self, fault: InjectedFault | None) -> None:
        """Inject this fault into the relayed bytes from now on, instead of the previous fault.

        None ends the fault, and relays the bytes that it held back.
        """
        self.fault = fault
        if fault is None:
            for end in list(self._ends):
                end.resume()

    def add(self, end: RelayConnection) -> None:
        self._ends.add(end)

    def remove(self, end: RelayConnection) -> None:
        self._ends.discard(end)

    def _dial(self, end: RelayConnection) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(
            loop.create_connection(lambda: RelayConnection(self, None, end), *self._target)
        )
        task.add_done_callback(
            lambda done: end.abort() if done.cancelled() or done.exception() else None
        )


class RelayConnection(asyncio.Protocol):
    """One of the two connections of a relayed TCP stream; `other` is the opposite connection.

    dial  function that opens the opposite connection; set only if a peer opened this one
    """

    def __init__(
        self,
        wire: FaultyRelay,
        dial: Callable[[RelayConnection], None] | None,
        other: RelayConnection | None = None,
    ) -> None:
        self._wire, self._dial, self._other = wire, dial, other
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._carried = 0
        self._last = b""
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._wire.add(self)
        if self._dial is not None:
            self._dial(self)
        elif self._other is not None and self._other._lost:
            self.abort()  # the other side closed while this one was being dialled
        elif self._other is not None:
            self._other._other = self
            self._other.resume()

    def data_received(self, data: bytes) -> None:
        if self._other is None or self._other._transport is None or self._stalled():
            self._waiting.append(data)
            return
        self._relay_bytes(data, self._other._transport)

    def resume(self) -> None:
        """Relay the bytes that an injected fault has held back, now that the fault has ended."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._wire.remove(self)
        if self._other is not None:
            self._other.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _stalled(self) -> bool:
        return self._wire.fault is not None and self._wire.fault.kind is FaultKind.WIRE_STALL

    def _relay_bytes(self, data: bytes, onward: asyncio.Transport) -> None:
        # Pass bytes on to the opposite connection. A fault starts after the first `after` KiB.
        fault, carried_before = self._wire.fault, self._carried
        self._carried += len(data)
        if fault is not None and self._carried > fault.after * 1024:
            offset = max(0, fault.after * 1024 - carried_before)
            if fault.kind is FaultKind.WIRE_CORRUPT:
                data = data[:offset] + bytes([data[offset] ^ 0x40]) + data[offset + 1 :]
            elif fault.kind is FaultKind.WIRE_CUT:
                onward.write(data[:offset])
                self.abort()
                return
            elif fault.kind is FaultKind.WIRE_REPLAY:
                data = data + (self._last or data)
        self._last = data[:65_536]
        onward.write(data)
