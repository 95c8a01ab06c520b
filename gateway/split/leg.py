"""A leg of a pair: one request to one engine, running beside its twin and telling once how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from gateway.errand import Errand, Landing
from gateway.relay import Relay, UpstreamBroke
from gateway.upstream import LOST, Connection, Downstream, Upstream

log = logging.getLogger("penstock")

Ended = Callable[["Leg", UpstreamBroke | None], None]


class Leg(Errand):
    """start() it; `ended` hears its end, and of which leg, unless it is closed before. It is its own payload: so it
    knows when it left.

    On a connection it is an errand without a coroutine: the answer's end steps it, and that is its own end. Only
    connecting is a coroutine.

    sent_at  when its bytes were asked for to be written; None: no engine has seen anything of it
    """

    __slots__ = (
        *("_body", "_connecting", "_connection", "_done", "_downstream", "_tell", "_leaving", "_on_sent", "_pooled"),
        "head",
        "relay",
        "sent_at",
        "upstream",
    )

    def __init__(
        self, upstream: Upstream, head: bytes, body: bytes, relay: Relay, downstream: Downstream, ended: Ended
    ) -> None:
        self.upstream = upstream
        self.head = head
        self.relay = relay
        self.sent_at: float | None = None
        self._body = body
        self._downstream = downstream
        self._tell: Ended | None = ended
        self._on_sent: Callable[[], None] | None = None
        self._leaving = False
        self._connecting: Errand | None = None
        self._connection: Connection | None = None
        self._done: Landing | None = None
        self._pooled = True

    def start(self, on_sent: Callable[[], None] | None = None) -> None:
        """Send it now."""
        self._on_sent = on_sent
        connection = self.upstream.pooled()
        if connection is not None:
            self._ride(connection)
        else:
            self._connect()

    @property
    def body(self) -> bytes:
        """What upstream writes after the head."""
        if self.sent_at is None:
            self.sent_at = monotonic()
            on_sent, self._on_sent = self._on_sent, None  # it knows the pair, which knows this: no ring may be left
            if on_sent is not None:
                on_sent()
        return self._body

    def release(self) -> None:
        """Let go of the bytes: the engine has them and nobody will send them again."""
        self._body = b""

    @property
    def over(self) -> bool:
        """It has ended, or is about to be closed: nothing more will be heard of it."""
        return self._tell is None or self._leaving

    def close(self) -> None:
        """Close its connection if it is still open; nothing is heard of it any more."""
        if self._tell is not None:
            self._forget()
            self.cancel()

    def cancel(self) -> None:
        """Wherever it is: the connection is closed, or never made."""
        connection, done, connecting = self._connection, self._done, self._connecting
        self._connection = self._done = self._connecting = None
        if connecting is not None:
            connecting.cancel()
        if connection is not None and done is not None:
            done.errand = None
            done.cancel()
            connection.abort()

    def close_in(self, seconds: float, ended: Ended | None = None) -> None:
        """As close(), but a little later. Until then it tells `ended` alone; without one its first token closes it."""
        if not self.over:
            self._tell, self._leaving = ended or _nobody, True
            self.relay.on_first = None if ended is not None else self._close_next
            self.upstream.outbox.loop.call_later(max(0.0, seconds), self.close)

    def _close_next(self) -> None:
        """Not within the callback that brings the token."""
        self.upstream.outbox.loop.call_soon(self.close)

    def _ride(self, connection: Connection) -> None:
        """Send it on this connection, and hear of the answer's end."""
        self._connection = connection
        try:
            done = self._done = connection.carry(self.head, self, self.relay, self._downstream)
        except Exception:
            log.exception("a leg failed inside the gateway")
            connection.abort()
            self._end(UpstreamBroke("internal", "the leg failed inside the gateway"))
            return
        if done.done():
            self.step()
        else:
            done.errand = self

    def step(self, error: BaseException | None = None) -> None:
        """The answer is over. A pooled connection that turns out dead before a byte came back costs nothing."""
        done, connection = self._done, self._connection
        self._done = self._connection = None
        if done is None:
            return
        problem = done.exception()
        if problem is None:
            self._end(None)
        elif not isinstance(problem, UpstreamBroke):
            raise problem
        elif not self.relay.untouched or problem.kind not in LOST:
            self._end(problem)
        elif self._pooled:
            self._connect()
        else:
            problem.fresh = connection is not None and connection.is_fresh
            self._end(problem)

    def _connect(self) -> None:
        self._pooled = False
        self._connecting = Errand(self._reach(), _nothing)
        self._connecting.step()

    async def _reach(self) -> None:
        try:
            connection = await self.upstream.connect()
        except UpstreamBroke as broke:
            broke.sent = self.sent_at is not None
            self._end(broke.with_traceback(None))  # that leads back here, and so to whoever keeps it: a cycle
        except Exception:
            log.exception("a leg failed inside the gateway")
            self._end(UpstreamBroke("internal", "the leg failed inside the gateway"))
        else:
            self._connecting = None
            if self._tell is None:
                connection.abort()
            else:
                self._ride(connection)

    def _end(self, problem: UpstreamBroke | None) -> None:
        self._connection = self._done = self._connecting = None
        ended = self._tell
        self._forget()
        if ended is not None:
            ended(self, problem)

    def _forget(self) -> None:
        """Whom it would tell of anything: they know the pair, which knows this, and no ring may be left."""
        self._tell = self._on_sent = self.relay.on_first = None


def _nobody(_: Leg, __: UpstreamBroke | None) -> None:
    """Hears nothing."""


def _nothing() -> None:
    """A leg tells its end itself."""
