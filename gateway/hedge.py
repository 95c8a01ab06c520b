"""Hedging: a second endpoint for a request whose first byte is late, and another one for those at a slow endpoint.

A plain request pays one append. Four times a second the sweep looks at requests without a first byte. A request is late
when it has waited longer than twice what the peers of its endpoint need for the prompts booked before it. It is hedged
when another endpoint is expected to answer it sooner, by more than the work there costs. The first endpoint to give a
byte of the answer serves the request; the other connection is closed, which engines take for an abort. Late requests at
an endpoint that is suspected to be slow, and all that wait at one ejected for it, are moved in place of being hedged.

Hedges and moves take a turn of the fleet's retry budget; hedges are also a small share of all requests. A turn is given
back when the answer has begun: it limits work that is done twice, not the length of answers. Not here: the expected
times (speed_monitor.py), and what follows a failed attempt (attempts.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway import legs
from gateway.client import Client
from gateway.exchange import Exchange
from gateway.upstream import Connection
from gateway.upstream_error import UpstreamBroke
from policies.model import Candidate, Pick
from policies.run import repicked
from policies.speed_record import Verdict

if TYPE_CHECKING:
    from gateway.booking import Booking
    from gateway.serve import Gateway
    from gateway.snapshot import Route

OVERTAKEN = "overtaken"
"""The kind of an attempt that ended because the second endpoint answered first."""
SLOW = "slow"
"""The kind of an attempt that ended because its endpoint is slow."""

HEADER = "x-penstock-hedge"  # "off": the client wants no second attempt at the same time
LEAST_LATE_S = 0.1
PRICE = 2.0  # the second answer must be expected so many times sooner than the first
MOST_SAVED = 50.0  # hedges that a time without any leaves for later
LATE_FACTOR = 2.0  # a first byte is late after so many times what the peers would need
MOVED_FACTOR = 1.2  # of health.slow_factor: so late it is evidence as well
CREDIT = 200  # requests whose hedges may be sent before they came: an engine may be slow from the start

Waiting = tuple[Exchange, Client, "Route"]


class Race:
    """Two attempts at one request. The first to give a byte of its answer serves it.

    booking    the place of the second attempt
    is_won     the second attempt serves the request; is_over: there is one attempt left
    loser      the name of the endpoint whose attempt was given up
    """

    __slots__ = (
        *("_client", "_first", "_pick", "_relay", "_sent", "_source", "_task", "_x"),
        *("booking", "is_over", "is_won", "loser"),
    )

    def __init__(self, x: Exchange, client: Client, first: Connection, pick: Pick, booking: Booking) -> None:
        self._x, self._client, self._first, self._pick = x, client, first, pick
        self.booking = booking
        self.is_won = self.is_over = False
        self.loser = ""
        self._source: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, route: Route) -> None:
        """Send the request to the second endpoint."""
        x, call = self._x, self._x.call
        assert call is not None
        head, self._sent, self._relay = legs.prepare(route, x, call, self._client, self.booking, self._first_token)
        assert x.relay is not None
        x.relay.on_first = self._lose
        sending = self.booking.upstream.send(head, self._sent, self._relay, self)
        self._task = asyncio.get_running_loop().create_task(sending, name=f"hedge {x.id}")
        self._task.add_done_callback(self._ended)

    # The client, as the second connection sees it

    @property
    def writing_paused(self) -> bool:
        return self._client.writing_paused

    def write(self, data: bytes) -> None:
        if data and self._win():
            self._client.write(data)

    def set_source(self, source: Connection | None) -> None:
        self._source = source
        if self.is_won:
            self._client.set_source(source)

    # Who wins

    def _win(self) -> bool:
        """The second attempt has a byte: whether it serves the request."""
        x = self._x
        if self.is_won or self.is_over:
            return self.is_won
        if x.committed or x.booking is None:
            return False
        self.loser, late = x.booking.endpoint.name, x.booking
        self.adopt()
        late.overtaken()
        late.doubt()
        self._first.fail(OVERTAKEN, "another endpoint answered first")
        self._client.set_source(self._source)
        return True

    def adopt(self) -> None:
        """The second attempt is the request's only one from now on."""
        x = self._x
        self.is_won = True
        x.booking, x.relay, x.sent, x.pick = self.booking, self._relay, self._sent, self._pick
        self._client.set_source(self._source)

    def _first_token(self) -> None:
        """The first token of the second attempt."""
        if self._win():
            self._x.first_token()

    def _lose(self) -> None:
        """The first token of the first attempt."""
        self.close()
        self._x.first_token()

    def close(self) -> None:
        """Give the second attempt up, unless it serves the request."""
        if self.is_won or self.is_over:
            return
        self.is_over = True
        self.loser = self.booking.endpoint.name
        if self._task is not None:
            self._task.cancel()
        self.booking.__exit__()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The second attempt is over. If the first one is still under way, only that is left."""
        error = None if task.cancelled() else task.exception()
        if self.is_won or self.is_over:
            return
        if isinstance(error, UpstreamBroke):
            self.booking.failed(error)
        self.close()

    async def finish(self) -> UpstreamBroke | None:
        """Serve the request by the second attempt; how it broke, or None when it is served."""
        if self.is_over:
            return None
        if not self.is_won:
            self.adopt()
        assert self._task is not None
        with self.booking as booking:
            try:
                await self._task
                legs.settle(self._x, self._client, self._relay, booking)
            except UpstreamBroke as broke:
                booking.failed(broke)
                return broke.with_traceback(None)
            finally:
                self.is_over = True
        return None


class Hedger:
    """Starts hedges and moves. serve.py adds to `waiting` and removes from it, attempts.py adds to `retrying`.

    allowed   hedges that the share of requests leaves now; `sent` and `moved` count
    retrying  requests that may hold a turn of the retry budget
    """

    __slots__ = ("_answered", "_credit", "allowed", "moved", "retrying", "sent", "waiting")

    def __init__(self, share: float) -> None:
        """`share`: hedges of all requests."""
        self.waiting: dict[Exchange, tuple[Client, Route]] = {}
        self.retrying: list[Exchange] = []
        self._answered, self._credit = 0.0, float(CREDIT)
        self.allowed = share * CREDIT
        self.sent = self.moved = 0

    def sweep(self, gateway: Gateway, now: float) -> None:
        """Look at all requests without a first byte. Due four times a second."""
        share = gateway.snapshot.config.retries.hedge
        answered, before = gateway.accounts.answered, self._answered
        self._answered = answered
        came = max(0.0, answered - before)
        paid_back = min(self._credit, came)
        self._credit -= paid_back
        self.allowed = min(MOST_SAVED, self.allowed + share * (came - paid_back))
        for x, (client, route) in tuple(self.waiting.items()):
            if x.status or x.retries or x.committed:  # over, or no longer without a byte at its first endpoint
                del self.waiting[x]
            elif x.hedge is None and not x.retrying:
                self._look(gateway, (x, client, route), now, share > 0)
        for x in self.retrying:
            if x.committed:
                x.end_retry(gateway.gate)
        self.retrying = [x for x in self.retrying if x.retrying]

    def _look(self, gateway: Gateway, one: Waiting, now: float, hedges: bool) -> None:
        x, client, route = one
        booking, relay = x.booking, x.relay
        if booking is None or relay is None or x.sent_at is None:
            return
        is_out = booking.is_out_as_slow
        moves = is_out or booking.live.speed.verdict is Verdict.SUSPECT
        waited_s = now - x.sent_at
        if not is_out and waited_s < LEAST_LATE_S:
            return
        if not moves and (not hedges or self.allowed < 1.0 or not may_hedge(client, route)):
            return
        speeds = gateway.endpoints.speeds
        factor = LATE_FACTOR if not moves else max(LATE_FACTOR, MOVED_FACTOR * speeds.limits.factor)
        left_s = speeds.left_s(booking.live, booking.request, booking.ahead_tokens, waited_s, factor)
        if left_s is None and not is_out:
            return
        best = _best(gateway, x, booking)
        connection = next((each for each in booking.upstream.connections if each.carries(relay)), None)
        if best is None or connection is None:
            return
        candidate, expected_s = best
        if not is_out and (left_s is None or left_s <= PRICE * expected_s + LEAST_LATE_S):
            return
        if not gateway.gate.retry_at_once():
            return
        x.retrying = True
        self.retrying.append(x)
        if moves:
            self.moved += 1
            booking.moved()
            connection.fail(SLOW, "the endpoint is slow")
        else:
            self._hedge(gateway, one, connection, candidate)

    def _hedge(self, gateway: Gateway, one: Waiting, first: Connection, candidate: Candidate) -> None:
        x, client, route = one
        assert x.pick is not None
        assert x.call is not None
        self.allowed -= 1.0
        self.sent += 1
        gateway.accounts.hedged(candidate.endpoint.name)
        pick = repicked(x.pick, candidate, () if x.asked is None else x.asked.cached)
        booking = gateway.endpoints.book(pick, x.call.request, x.fingerprint)
        x.hedge = Race(x, client, first, pick, booking)
        try:
            x.hedge.start(route)
        except BaseException:
            x.hedge.close()
            raise


def may_hedge(client: Client, route: Route) -> bool:
    """Whether a request may be at two endpoints at the same time."""
    return route.leg is legs.single and client.headers.get(HEADER) != "off"


def _best(gateway: Gateway, x: Exchange, booking: Booking) -> tuple[Candidate, float] | None:
    """The endpoint of those the policy considered that is expected to answer soonest."""
    assert x.call is not None
    request, cached = x.call.request, () if x.asked is None else x.asked.cached
    best: tuple[Candidate, float] | None = None
    for candidate in () if x.pick is None else x.pick.kept:
        load, endpoint = candidate.load, candidate.endpoint
        if endpoint is booking.endpoint or not load.available:
            continue
        if load.in_flight >= min(endpoint.max_concurrency, load.ceiling):
            continue
        held = cached[load.slot] if load.slot < len(cached) else 0
        tokens = load.prefill_tokens + max(1, request.prompt_tokens - held)
        expected_s = gateway.endpoints.first_byte_s(load.slot, request, tokens)
        if expected_s is not None and (best is None or expected_s < best[1]):
            best = candidate, expected_s
    return best
