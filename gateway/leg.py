"""A leg of a pair: one request to one engine, running beside its twin and telling once how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from gateway.errand import Errand
from gateway.relay import Relay, UpstreamBroke
from gateway.upstream import Downstream, Upstream

log = logging.getLogger("penstock")

Ended = Callable[[UpstreamBroke | None], None]


class Leg:
    """start() it; `ended` hears its end unless it is closed before. It is its own payload: so it knows when it left.

    sent_at  when its bytes were asked for to be written; None: no engine has seen anything of it
    """

    __slots__ = (
        "_body",
        "_downstream",
        "_ended",
        "_errand",
        "_leaving",
        "_on_sent",
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
        self._ended: Ended | None = ended
        self._on_sent: Callable[[], None] | None = None
        self._leaving = False
        self._errand = Errand(self._run(), _nothing)

    def start(self, on_sent: Callable[[], None] | None = None) -> None:
        """Send it now."""
        self._on_sent = on_sent
        self._errand.step()

    @property
    def body(self) -> bytes:
        """What upstream writes after the head."""
        if self.sent_at is None:
            self.sent_at = monotonic()
            if self._on_sent is not None:
                self._on_sent()
        return self._body

    def release(self) -> None:
        """Let go of the bytes: the engine has them and nobody will send them again."""
        self._body = b""

    @property
    def over(self) -> bool:
        """It has ended, or is about to be closed: nothing more will be heard of it."""
        return self._ended is None or self._leaving

    def close(self) -> None:
        """Close its connection if it is still open; nothing is heard of it any more."""
        if self._ended is not None:
            self._ended = None
            self._errand.cancel()

    def close_in(self, seconds: float, ended: Ended | None = None) -> None:
        """As close(), but a little later. Until then it tells `ended` alone; without one its first token closes it."""
        if not self.over:
            self._ended, self._leaving = ended or _nobody, True
            self.relay.on_first = None if ended is not None else self._close_next
            self.upstream.outbox.loop.call_later(max(0.0, seconds), self.close)

    def _close_next(self) -> None:
        """Not within the callback that brings the token."""
        self.upstream.outbox.loop.call_soon(self.close)

    async def _run(self) -> None:
        problem: UpstreamBroke | None = None
        try:
            await self.upstream.send(self.head, self, self.relay, self._downstream)
        except UpstreamBroke as broke:
            problem = broke
        except Exception:
            log.exception("a leg failed inside the gateway")
            problem = UpstreamBroke("internal", "the leg failed inside the gateway")
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(problem)


def _nobody(_: UpstreamBroke | None) -> None:
    """Hears nothing."""


def _nothing() -> None:
    """A leg tells its end itself."""
