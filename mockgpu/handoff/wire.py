"""A bad wire: a relay before a group's agent, through which peers reach it and by which their bytes come to harm.

It knows nothing of what it carries: it flips a byte, breaks off, says something twice, or falls silent. TCP only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mockgpu.faults import Fault, FaultKind


class BadWire:
    """Listens before an agent; sole owner of the connections through it. `fault` is what is wrong now, if anything."""

    def __init__(self, host: str) -> None:
        self.fault: Fault | None = None
        self.port = 0
        self._host = host
        self._target = ("", 0)
        self._server: asyncio.Server | None = None
        self._ends: set[End] = set()

    async def start(self, host: str, port: int) -> None:
        """Stand before the agent at that address. OSError when no port is free."""
        self._target = (host, port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: End(self, self._dial), self._host, self.port
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Nobody comes through any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in list(self._ends):
            end.abort()

    def set(self, fault: Fault | None) -> None:
        """From now on this is wrong; None: all is well, and what was held back goes on."""
        self.fault = fault
        if fault is None:
            for end in list(self._ends):
                end.resume()

    def joined(self, end: End) -> None:
        self._ends.add(end)

    def left(self, end: End) -> None:
        self._ends.discard(end)

    def _dial(self, end: End) -> None:
        """The far side of a connection that has come in."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.create_connection(lambda: End(self, None, end), *self._target))
        task.add_done_callback(
            lambda done: end.abort() if done.cancelled() or done.exception() else None
        )


class End(asyncio.Protocol):
    """One side of a relayed connection. `dial` is asked for the other side; else `other` is it."""

    def __init__(
        self, wire: BadWire, dial: Callable[[End], None] | None, other: End | None = None
    ) -> None:
        self._wire, self._dial, self._other = wire, dial, other
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._carried = 0
        self._last = b""
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._wire.joined(self)
        if self._dial is not None:
            self._dial(self)
        elif (
            self._other is not None and self._other._lost
        ):  # it left while this side was being dialled
            self.abort()
        elif self._other is not None:
            self._other._other = self
            self._other.resume()

    def data_received(self, data: bytes) -> None:
        if self._other is None or self._other._transport is None or self._stalled():
            self._waiting.append(data)
            return
        self._carry(data, self._other._transport)

    def resume(self) -> None:
        """Carry what had to wait."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._wire.left(self)
        if self._other is not None:
            self._other.abort()

    def abort(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _stalled(self) -> bool:
        return self._wire.fault is not None and self._wire.fault.kind is FaultKind.WIRE_STALL

    def _carry(self, data: bytes, onward: asyncio.Transport) -> None:
        """Pass bytes on, well or badly: harm comes to what is carried after the first `after` KiB."""
        fault, before = self._wire.fault, self._carried
        self._carried += len(data)
        if fault is not None and self._carried > fault.after * 1024:
            at = max(0, fault.after * 1024 - before)
            if fault.kind is FaultKind.WIRE_CORRUPT:
                data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
            elif fault.kind is FaultKind.WIRE_CUT:
                onward.write(data[:at])
                self.abort()
                return
            elif fault.kind is FaultKind.WIRE_REPLAY:
                data = data + (self._last or data)
        self._last = data[:65_536]
        onward.write(data)
