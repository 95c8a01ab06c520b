"""An engine for a leg without sockets: connections that a test answers or breaks, and a loop that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.disagg.leg import Leg
from gateway.disagg.response_buffer import ResponseBuffer
from gateway.http.eager_task import EagerFuture, new_future
from gateway.http.upstream import ConnectionPool
from gateway.protocol.relay import Relay, UpstreamError
from tests.replaced import stand_in


class Loop:
    """As much of an event loop as a leg uses: what is to come is in `later`, with its delay."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.later.append((delay_s, lambda: call(*args)))

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self.call_later(0.0, call, *args)

    def pass_by(self) -> None:
        """All that was to come has its time."""
        due, self.later = self.later, []
        for _, call in due:
            call()


class Wire:
    """One connection. The bytes of every request that it carried; `done` lands with the answer's end."""

    is_fresh = True

    def __init__(self) -> None:
        self.carried: list[bytes] = []
        self.aborted = False
        self.bug: Exception | None = None

    def carry(self, head: bytes, payload: Any, relay: Relay, downstream: object) -> EagerFuture:
        if self.bug is not None:
            raise self.bug
        self.carried.append(head + payload.body)
        self.done = new_future(asyncio.get_running_loop())
        return self.done

    def ends(self, kind: str = "") -> None:
        self.done.resolve(UpstreamError(kind, "as asked") if kind else None)

    def abort(self) -> None:
        self.aborted = True


class There:
    """An upstream: `idle` connections, and others that take until `open` to be made."""

    def __init__(self, *idle: Wire) -> None:
        self.idle = list(idle)
        self.made: list[Wire] = []
        self.outbox = self
        self.loop = Loop()
        self.deaf = False  # to its cancellation: it had been connected already
        self.cancelled = False

    def pooled(self) -> Wire | None:
        return self.idle.pop() if self.idle else None

    async def connect(self) -> Wire:
        self.gate = new_future(asyncio.get_running_loop())
        try:
            await self.gate
        except asyncio.CancelledError:
            self.cancelled = True
            if not self.deaf:
                raise
        self.made.append(Wire())
        return self.made[-1]

    def open(self) -> None:
        self.gate.resolve()


class Told:
    """Hears how a leg ended."""

    def __init__(self) -> None:
        self.ends: list[str | None] = []

    def __call__(self, leg: Leg, problem: UpstreamError | None) -> None:
        self.ends.append(None if problem is None else problem.kind)


def leg_to(there: There, told: Told) -> Leg:
    return Leg(stand_in(ConnectionPool, there), b"head ", b"body", Relay(b"", is_http_1_0=True), ResponseBuffer(), told)
