"""Asks the bootstrap server beside a prefill engine for the identities of the engine's ranks.

All attempts that need one server's answer share one query. Not here: what the page means
(kvtransfer.dialects), and remembering it (gateway/disagg/handoffs.py).
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.disagg.leg import Leg
from gateway.disagg.response_buffer import Inbox
from gateway.http.upstream import Patience, Upstream
from gateway.http.write_queue import Outbox
from gateway.protocol.relay import Relay, UpstreamBroke
from kvtransfer.dialects import Bootstrap

ANSWER_S = 1.0  # connecting included: the page is a few names long
_PATIENCE = Patience(ANSWER_S, ANSWER_S, ANSWER_S)

Callback = Callable[[UpstreamBroke | None, bytes], None]


class Bootstraps:
    """The queries under way, by server. Queries are rare, so no connection to a server is kept."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queries: dict[str, Query] = {}

    def ask(self, server: Bootstrap, told: Callback) -> Query:
        """Call `told` with the page, or with what broke, within ANSWER_S seconds.

        No call follows once it has left the query.
        """
        netloc = server.netloc
        query = self._queries.get(netloc)
        if query is None:
            query = Query(netloc, self._outbox, lambda: self._queries.pop(netloc))
            self._queries[netloc] = query
        query.join(told)
        return query

    def close(self) -> None:
        for query in tuple(self._queries.values()):
            query.close()


class Query:
    """One `GET /query` and the callbacks that wait for it.

    It ends with its answer, when its time is up, or when the last callback leaves.
    """

    __slots__ = ("_callbacks", "_inbox", "_leg", "_over", "_relay", "_server", "_timer")

    def __init__(self, at: str, outbox: Outbox, over: Callable[[], object]) -> None:
        """`over` is called once, before the callbacks."""
        self._over: Callable[[], object] | None = over
        self._callbacks: list[Callback] = []
        self._server = Upstream(f"http://{at}", None, _PATIENCE, outbox)
        self._relay, self._inbox = Relay(b"", http_1_0=True), Inbox()
        head = b"GET" + self._server.head("/query")[4:] + b"\r\n"
        self._leg = Leg(self._server, head, b"", self._relay, self._inbox, self._on_ended)
        self._timer = outbox.loop.call_later(ANSWER_S, self._on_timeout)
        self._leg.start()

    def join(self, told: Callback) -> None:
        """Add a callback for the answer."""
        self._callbacks.append(told)

    def leave(self, told: Callback) -> None:
        """Remove a callback, and end the query if it was the last one."""
        if told in self._callbacks:
            self._callbacks.remove(told)
            if not self._callbacks:
                self.close()

    def close(self) -> None:
        """End the query without calling back."""
        over, self._over = self._over, None
        if over is not None:
            over()
        self._callbacks = []
        self._timer.cancel()
        self._leg.close()
        self._server.close()

    def _on_ended(self, _: Leg, problem: UpstreamBroke | None) -> None:
        self._call_back(problem, b"" if self._relay.refused else self._inbox.body)

    def _on_timeout(self) -> None:
        self._call_back(UpstreamBroke("timeout", f"no answer within {ANSWER_S:g} s"), b"")

    def _call_back(self, problem: UpstreamBroke | None, page: bytes) -> None:
        callbacks = self._callbacks
        self.close()
        for callback in callbacks:
            callback(problem, page)
