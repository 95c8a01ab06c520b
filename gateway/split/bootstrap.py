"""Asks the bootstrap server beside a prefill engine who the engine's ranks are: one query at a time, for all who wait.

Not here: what its page means (kvtransfer.dialects), and remembering it (handoffs.py).
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.outbox import Outbox
from gateway.relay import Relay, UpstreamBroke
from gateway.split.inbox import Inbox
from gateway.split.leg import Leg
from gateway.upstream import Patience, Upstream
from kvtransfer.dialects import Bootstrap

ANSWER_S = 1.0  # connecting and all: the page is a few names long
_PATIENCE = Patience(ANSWER_S, ANSWER_S, ANSWER_S)

Told = Callable[[UpstreamBroke | None, bytes], None]


class Bootstraps:
    """The queries under way, by server. A server is asked seldom: no connection to it is kept."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queries: dict[str, Query] = {}

    def ask(self, server: Bootstrap, told: Told) -> Query:
        """`told` hears the page, or what broke, within ANSWER_S; unless it leaves before."""
        at = server.netloc
        query = self._queries.get(at)
        if query is None:
            query = self._queries[at] = Query(at, self._outbox, lambda: self._queries.pop(at))
        query.join(told)
        return query

    def close(self) -> None:
        for query in tuple(self._queries.values()):
            query.close()


class Query:
    """One `GET /query`, and who waits for its answer. It ends with its answer, in time, or with the last who leaves."""

    __slots__ = ("_inbox", "_leg", "_over", "_relay", "_server", "_timer", "_waiting")

    def __init__(self, at: str, outbox: Outbox, over: Callable[[], object]) -> None:
        """`over` is called once, before anybody is told."""
        self._over: Callable[[], object] | None = over
        self._waiting: list[Told] = []
        self._server = Upstream(f"http://{at}", None, _PATIENCE, outbox)
        self._relay, self._inbox = Relay(b"", http_1_0=True), Inbox()
        head = b"GET" + self._server.head("/query")[4:] + b"\r\n"
        self._leg = Leg(self._server, head, b"", self._relay, self._inbox, self._ended)
        self._timer = outbox.loop.call_later(ANSWER_S, self._overdue)
        self._leg.start()

    def join(self, told: Told) -> None:
        self._waiting.append(told)

    def leave(self, told: Told) -> None:
        """It hears nothing any more."""
        if told in self._waiting:
            self._waiting.remove(told)
            if not self._waiting:
                self.close()

    def close(self) -> None:
        """Nobody is told anything."""
        over, self._over = self._over, None
        if over is not None:
            over()
        self._waiting = []
        self._timer.cancel()
        self._leg.close()
        self._server.close()

    def _ended(self, _: Leg, problem: UpstreamBroke | None) -> None:
        self._tell(problem, b"" if self._relay.refused else self._inbox.body)

    def _overdue(self) -> None:
        self._tell(UpstreamBroke("timeout", f"no answer within {ANSWER_S:g} s"), b"")

    def _tell(self, problem: UpstreamBroke | None, page: bytes) -> None:
        waiting = self._waiting
        self.close()
        for told in waiting:
            told(problem, page)
