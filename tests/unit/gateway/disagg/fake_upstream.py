"""A fake connection to an engine and a fake event loop, for tests of one half of a split
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.disagg.leg import Leg
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.http.eager_task import EagerFuture, new_future
from gateway.http.engine_connections import ConnectionPool
from gateway.protocol.response.relay import Relay, UpstreamError
from tests.replacement import stand_in


class ManualLoop:
    """A fake event loop that runs scheduled calls only when the test does. `later` has those calls."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.later.append((delay_s, lambda: call(*args)))

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self.call_later(0.0, call, *args)

    def run_due(self) -> None:
        due, self.later = self.later, []
        for _, call in due:
            call()


class FakeConnection:
    """A fake connection to an engine. It records the requests that are sent on it.

    `done` is a future that ends with the response.
    """

    is_recently_started = True

    def __init__(self) -> None:
        self.carried: list[bytes] = []
        self.aborted = False
        self.bug: Exception | None = None

    def start(self, head: bytes, payload: Any, relay: Relay, downstream: object) -> EagerFuture:
        if self.bug is not None:
            raise self.bug
        self.carried.append(head + payload.body)
        self.done = new_future(asyncio.get_running_loop())
        return self.done

    def ends(self, kind: str = "") -> None:
        self.done.resolve(UpstreamError(kind, "as asked") if kind else None)

    def abort(self) -> None:
        self.aborted = True


class FakeUpstream:
    def __init__(self, *idle: FakeConnection) -> None:
        self.idle = list(idle)
        self.opened: list[FakeConnection] = []
        self.outbox = self
        self.loop = ManualLoop()
        self.ignores_cancel = False  # as if the connection had just been established
        self.cancelled = False

    def take_idle(self) -> FakeConnection | None:
        return self.idle.pop() if self.idle else None

    async def connect(self) -> FakeConnection:
        self.gate = new_future(asyncio.get_running_loop())
        try:
            await self.gate
        except asyncio.CancelledError:
            self.cancelled = True
            if not self.ignores_cancel:
                raise
        self.opened.append(FakeConnection())
        return self.opened[-1]

    def open(self) -> None:
        self.gate.resolve()


class EndRecorder:
    def __init__(self) -> None:
        self.ends: list[str | None] = []

    def __call__(self, leg: Leg, problem: UpstreamError | None) -> None:
        self.ends.append(None if problem is None else problem.kind)


def leg_to(upstream: FakeUpstream, report: EndRecorder) -> Leg:
    return Leg(
        stand_in(ConnectionPool, upstream),
        b"head ",
        b"body",
        Relay(b"", is_http_1_0=True),
        InternalAnswer(),
        report,
    )
