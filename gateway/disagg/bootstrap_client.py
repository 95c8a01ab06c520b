"""A client for a prefill engine's bootstrap server, which knows the identities of the engine's
ranks.

All attempts that need one server's answer share one query. kvtransfer.dialects interprets the
answer, gateway/disagg/handoffs.py stores it.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.disagg.internal_answer import InternalAnswer
from gateway.disagg.leg import Leg
from gateway.http.upstream import ConnectionPool, UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.protocol.response.relay import Relay, UpstreamError
from kvtransfer.dialects import BootstrapAddress

ANSWER_S = 1.0  # connecting included: the page is a few names long
_PATIENCE = UpstreamTimeouts(ANSWER_S, ANSWER_S, ANSWER_S)

Callback = Callable[[UpstreamError | None, bytes], None]


class BootstrapClient:
    """Queries the bootstrap servers of prefill engines, with one query at a time per server.

    Connections are not kept open.
    """

    def __init__(self, outbox: WriteQueue) -> None:
        self._outbox = outbox
        self._queries: dict[str, BootstrapQuery] = {}

    def query(self, server: BootstrapAddress, callback: Callback) -> BootstrapQuery:
        """Query a bootstrap server; `callback` gets the answer, or an error, within ANSWER_S
        seconds.

        The callback is not called after the caller has left the returned query.
        """
        netloc = server.netloc
        query = self._queries.get(netloc)
        if query is None:
            query = BootstrapQuery(netloc, self._outbox, lambda: self._queries.pop(netloc))
            self._queries[netloc] = query
        query.join(callback)
        return query

    def close(self) -> None:
        for query in tuple(self._queries.values()):
            query.close()


class BootstrapQuery:
    """One `GET /query` request to a bootstrap server, and the callbacks that wait for its answer.

    The query ends with the answer, at its timeout, or when the last callback leaves.
    """

    __slots__ = ("_callbacks", "_inbox", "_leg", "_over", "_relay", "_server", "_timer")

    def __init__(self, at: str, outbox: WriteQueue, over: Callable[[], object]) -> None:
        # Send the query to the server `at`; at its end, `over` is called before the callbacks.
        self._over: Callable[[], object] | None = over
        self._callbacks: list[Callback] = []
        self._server = ConnectionPool(f"http://{at}", None, _PATIENCE, outbox)
        self._relay, self._inbox = Relay(b"", is_http_1_0=True), InternalAnswer()
        head = b"GET" + self._server.request_head("/query")[4:] + b"\r\n"
        self._leg = Leg(self._server, head, b"", self._relay, self._inbox, self._on_ended)
        self._timer = outbox.loop.call_later(ANSWER_S, self._on_timeout)
        self._leg.start()

    def join(self, callback: Callback) -> None:
        """Add a callback that is called with the answer of the bootstrap server, or with an
        error.
        """
        self._callbacks.append(callback)

    def leave(self, callback: Callback) -> None:
        """Remove a callback, and end the query of the bootstrap server if it was the last one."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)
            if not self._callbacks:
                self.close()

    def close(self) -> None:
        """End the query of the bootstrap server without calling its callbacks."""
        over, self._over = self._over, None
        if over is not None:
            over()
        self._callbacks = []
        self._timer.cancel()
        self._leg.close()
        self._server.close()

    def _on_ended(self, _: Leg, problem: UpstreamError | None) -> None:
        self._call_back(problem, b"" if self._relay.is_refused else self._inbox.body)

    def _on_timeout(self) -> None:
        self._call_back(UpstreamError("timeout", f"no answer within {ANSWER_S:g} s"), b"")

    def _call_back(self, problem: UpstreamError | None, page: bytes) -> None:
        callbacks = self._callbacks
        self.close()
        for callback in callbacks:
            callback(problem, page)
