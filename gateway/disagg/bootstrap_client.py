"""A client for bootstrap servers, which tell decode engines how to reach a prefill engine.

A bootstrap server belongs to a prefill engine and returns the ids of the engine's ranks. Split
requests that need the answer of one server at the same time share one query. kvtransfer.dialects
parses the answer, and gateway/disagg/handoffs.py stores it.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.disagg.leg import Leg
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.http.engine_connections import ConnectionPool
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.protocol.response.relay import Relay, UpstreamError
from kvtransfer.dialects import BootstrapAddress

ANSWER_S = 1.0  # maximum time to connect and to read the answer, which is short
_PATIENCE = UpstreamTimeouts(ANSWER_S, ANSWER_S, ANSWER_S)

Callback = Callable[[UpstreamError | None, bytes], None]


class BootstrapClient:
    """Queries bootstrap servers of prefill engines, with at most one query per server at a time.

    Each query opens a new connection.
    """

    def __init__(self, outbox: WriteQueue) -> None:
        self._outbox = outbox
        self._queries: dict[str, BootstrapQuery] = {}

    def query(self, server: BootstrapAddress, callback: Callback) -> BootstrapQuery:
        """Query a bootstrap server; `callback` gets its answer or an error within ANSWER_S seconds.

        If the caller no longer needs the answer, it removes the callback with leave() of the
        returned query.
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
        """Add a callback, to be called with the bootstrap server's answer or with an error."""
        self._callbacks.append(callback)

    def leave(self, callback: Callback) -> None:
        """Remove a callback. The query ends when the last callback has been removed."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)
            if not self._callbacks:
                self.close()

    def close(self) -> None:
        """End the query to a bootstrap server without calling its callbacks."""
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
        self._call_back(UpstreamError("timeout", f"it did not answer within {ANSWER_S:g} s"), b"")

    def _call_back(self, problem: UpstreamError | None, page: bytes) -> None:
        callbacks = self._callbacks
        self.close()
        for callback in callbacks:
            callback(problem, page)
