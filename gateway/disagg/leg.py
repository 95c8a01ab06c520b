"""One of the two HTTP requests of a split request (a leg): to its prefill or its decode engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from gateway.http.eager_task import EagerFuture, EagerTask
from gateway.http.engine_connections import (
    LOST_KINDS,
    ConnectionPool,
    Downstream,
    UpstreamConnection,
)
from gateway.protocol.response.relay import Relay, UpstreamError

log = logging.getLogger("penstock")

Ended = Callable[["Leg", UpstreamError | None], None]


class Leg(EagerTask):
    """One of the two HTTP requests of a split request: the one to its prefill or its decode engine.

    - At its end, a leg calls `ended` once: with an error, or with None after success. If it is
      closed before, it does not call `ended`.
    - No coroutine runs for a leg, except while it connects.
    - A leg implements RequestPayload, so that it notices when its bytes are written.
    - A leg is the task that waits for the answer: step() is called at the end of the answer, and
      ends the leg.

    sent_at  when the request's bytes were written; None: no engine has received any of them
    """

    __slots__ = (
        *("_body", "_connecting", "_connection", "_done", "_downstream", "_is_leaving"),
        *("_on_ended", "_on_sent", "_pooled", "head", "relay", "sent_at", "upstream"),
    )

    def __init__(
        self,
        upstream: ConnectionPool,
        head: bytes,
        body: bytes,
        relay: Relay,
        downstream: Downstream,
        ended: Ended,
    ) -> None:
        self.upstream = upstream
        self.head = head
        self.relay = relay
        self.sent_at: float | None = None
        self._body = body
        self._downstream = downstream
        self._on_ended: Ended | None = ended
        self._on_sent: Callable[[], None] | None = None
        self._is_leaving = False
        self._connecting: EagerTask | None = None
        self._connection: UpstreamConnection | None = None
        self._done: EagerFuture | None = None
        self._pooled = True

    def start(self, on_sent: Callable[[], None] | None = None) -> None:
        """Send the request to the engine, on an idle connection if there is one.

        `on_sent` is called when the request is written.
        """
        self._on_sent = on_sent
        connection = self.upstream.take_idle()
        if connection is not None:
            self._send_on(connection)
        else:
            self._connect()

    @property
    def body(self) -> bytes:
        """Return the body of the request, which the connection writes after the head.

        The first access marks the request as sent.
        """
        if self.sent_at is None:
            self.sent_at = monotonic()
            # The callback leads to the attempt, which leads here: no reference cycle may be left.
            on_sent, self._on_sent = self._on_sent, None
            if on_sent is not None:
                on_sent()
        return self._body

    def release(self) -> None:
        """Free the body of the request, because it will not be sent again."""
        self._body = b""

    @property
    def is_over(self) -> bool:
        """Return whether this request has ended or is being closed; then it calls no callback."""
        return self._on_ended is None or self._is_leaving

    @property
    def is_leaving(self) -> bool:
        """Return whether the answer may still arrive, although it is not needed any more."""
        return self._is_leaving and self._on_ended is not None

    def close(self) -> None:
        """End the request and close its connection without calling `ended`; may be repeated."""
        if self._on_ended is not None:
            self._drop_callbacks()
            self.cancel()

    def cancel(self) -> None:
        """Close the connection to the engine, or stop connecting, without calling `ended`."""
        connection, done, connecting = self._connection, self._done, self._connecting
        self._connection = self._done = self._connecting = None
        if connecting is not None:
            connecting.cancel()
        if connection is not None and done is not None:
            done.waiter = None
            done.cancel()
            connection.abort()

    def close_in(self, seconds: float, ended: Ended | None = None) -> None:
        """Close the connection in `seconds` seconds, unless the engine's answer ends before that.

        ended  replaces the callback for an answer that ends in time. None: no callback is called,
               and the connection is closed at the first token of the answer, if that is sooner
        """
        if not self.is_over:
            self._on_ended, self._is_leaving = ended or _ignore, True
            self.relay.on_first_token = None if ended is not None else self._close_soon
            self.upstream.outbox.loop.call_later(max(0.0, seconds), self.close)

    def _close_soon(self) -> None:
        self.upstream.outbox.loop.call_soon(self.close)

    def _send_on(self, connection: UpstreamConnection) -> None:
        # Send the request on this connection; the end of the answer then calls step().
        self._connection = connection
        try:
            done = connection.start(self.head, self, self.relay, self._downstream)
            self._done = done
        except Exception:
            log.exception("a request to an engine failed inside the gateway")
            connection.abort()
            self._end(UpstreamError("internal", "the request failed inside the gateway"))
            return
        if done.done():
            self.step()
        else:
            done.waiter = self

    def step(self, error: BaseException | None = None) -> None:
        """Handle the end of the engine's answer.

        If a reused connection was lost before the first byte, the request is sent once more, on a
        new connection.
        """
        done, connection = self._done, self._connection
        self._done = self._connection = None
        if done is None:
            return
        problem = done.exception()
        if problem is None:
            self._end(None)
        elif not isinstance(problem, UpstreamError):
            raise problem
        elif not self.relay.is_untouched or problem.kind not in LOST_KINDS:
            self._end(problem)
        elif self._pooled:
            self._connect()
        else:
            problem.was_new_connection = connection is not None and connection.is_recently_started
            self._end(problem)

    def _connect(self) -> None:
        self._pooled = False
        self._connecting = EagerTask(self._send_on_new(), _do_nothing)
        self._connecting.step()

    async def _send_on_new(self) -> None:
        try:
            connection = await self.upstream.connect()
        except UpstreamError as broke:
            broke.was_sent = self.sent_at is not None
            # The error's traceback refers to this frame and its callers, a reference cycle.
            self._end(broke.with_traceback(None))
        except Exception:
            log.exception("a request to an engine failed inside the gateway")
            self._end(UpstreamError("internal", "the request failed inside the gateway"))
        else:
            self._connecting = None
            if self._on_ended is None:
                connection.abort()
            else:
                self._send_on(connection)

    def _end(self, problem: UpstreamError | None) -> None:
        self._connection = self._done = self._connecting = None
        on_ended = self._on_ended
        self._drop_callbacks()
        if on_ended is not None:
            on_ended(self, problem)

    def _drop_callbacks(self) -> None:
        # Drop the callbacks, because they refer to the attempt and form a reference cycle.
        self._on_ended = self._on_sent = self.relay.on_first_token = None


def _ignore(_: Leg, __: UpstreamError | None) -> None:
    # Ignore the end of a leg that is about to be closed.
    ...


def _do_nothing() -> None:
    # Do nothing at the end of connecting: the leg itself reports how it ended.
    ...
