"""Hedging: sends a late request to a second endpoint too, or moves it away from a slow one.

For most requests, hedging costs only an insertion into a dict and a removal. sweep() looks at the
requests without a first byte four times a second. hedge_stalled() does so 20 times a second at
endpoints that are in doubt (late before, or possibly slow) or whose prefill stalls.

A request is late if it has waited longer than twice the time that the endpoint's peers need for the
prompts ahead of it. It is hedged if another endpoint is expected to answer in half of its remaining
wait. The first endpoint that sends a byte of the answer serves the request. The other connection is
closed, which engines treat as an abort.

Some requests are moved instead:

- late requests at an endpoint that may be slow
- late requests behind others at an endpoint in doubt
- all requests that wait at an endpoint ejected as slow

The retry budget limits how many retries may be in progress. A hedge or a move takes one of them,
until the answer begins. Hedges are also limited to a share of all requests.

gateway/fleet/speed_monitor.py predicts times, and gateway/proxy/attempt_loop.py handles failed
attempts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from gateway.admission.admission_controller import AdmissionController
from gateway.config import Resume
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.reservation import Reservation
from gateway.fleet.speed_monitor import hardware_key
from gateway.forwarding import engine_refusal, forward
from gateway.http.client_interface import Client
from gateway.http.engine_connections import UpstreamConnection
from gateway.protocol.upstream_error import UpstreamError
from gateway.request_record import Exchange
from gateway.telemetry.accounting import Accounting
from policies.health.endpoint_speed import SpeedVerdict
from policies.health.late_request_detection import LEAST_LATE_S
from policies.routing_algorithm import repick
from policies.routing_types import Candidate, Endpoint, Pick

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.fleet.live_endpoint import LiveEndpoint

OVERTAKEN = "overtaken"
"""The kind of failure of an attempt that ended because the second endpoint answered first."""
SLOW = "slow"
"""The kind of failure of an attempt that ended because its endpoint is slow."""

HEDGE_HEADER = "x-penstock-hedge"  # "off": the client wants no second attempt at the same time
SPEEDUP = 2.0  # factor by which the second answer must be expected sooner than the first
MAX_ALLOWED = 50.0  # maximum number of hedges that may be saved up
# Hedging starts with the allowance of this many requests: an engine may be slow from the start.
INITIAL_REQUESTS = 200


class HedgedRoute(Protocol):
    """The interface of a route for hedging, which sends a late request to a second endpoint too."""

    @property
    def resume(self) -> Resume | None: ...
    @property
    def split(self) -> object | None: ...
    def resolve_name(self, endpoint: Endpoint) -> str: ...


class HedgedRequest(Protocol):
    """The interface of a request that waits for its first byte, and may be hedged if it is late.

    The plan in gateway/proxy/whole_request.py implements it.
    """

    @property
    def exchange(self) -> Exchange: ...
    @property
    def client(self) -> Client: ...
    @property
    def route(self) -> HedgedRoute: ...


class Race:
    """Two concurrent attempts to serve one request. The first to receive a byte of the answer wins.

    reservation  the capacity reservation of the second attempt
    is_won       whether the second attempt serves the request
    is_over      whether only one attempt is left
    loser        name of the endpoint whose attempt was closed; "" while both run
    """

    __slots__ = (
        *("_client", "_exchange", "_first", "_first_name", "_pick", "_relay", "_sent", "_served"),
        *("_source", "_task", "reservation", "is_over", "is_won", "loser"),
    )

    def __init__(
        self,
        exchange: Exchange,
        client: Client,
        first: UpstreamConnection,
        pick: Pick,
        reservation: Reservation,
        served: str,
    ) -> None:
        """Prepare a second attempt at a request whose first attempt is late.

        start() sends the second attempt.

        first        the connection of the first attempt
        pick         the pick of the second endpoint
        reservation  the capacity reserved there
        served       the second endpoint's name of the model
        """
        assert exchange.reservation is not None
        self._exchange, self._client, self._first, self._pick = exchange, client, first, pick
        self._first_name = exchange.reservation.endpoint.name
        self.reservation, self._served = reservation, served
        self.is_won = self.is_over = False
        self.loser = ""
        self._source: UpstreamConnection | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send the request to the second endpoint, while the first attempt continues."""
        exchange, call = self._exchange, self._exchange.call
        assert call is not None
        head, self._sent, self._relay = forward.prepare(
            exchange, call, self._client, self.reservation, self._on_first_token, self._served
        )
        assert exchange.relay is not None
        exchange.relay.on_first_token = self._on_lost
        sending = self.reservation.upstream.send(head, self._sent, self._relay, self)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(sending, name=f"hedge {exchange.id}")
        self._task.add_done_callback(self._on_task_done)

    # The downstream of the second connection

    @property
    def is_writing_paused(self) -> bool:
        return self._client.is_writing_paused

    def write(self, data: bytes) -> None:
        if data and self._try_win():
            self._client.write(data)

    def set_source(self, source: UpstreamConnection | None) -> None:
        self._source = source
        if self.is_won:
            self._client.set_source(source)

    # Choosing the attempt whose answer the client gets

    def _try_win(self) -> bool:
        exchange = self._exchange
        if self.is_won or self.is_over:
            return self.is_won
        if exchange.is_committed or exchange.reservation is None:
            return False
        late = exchange.reservation
        self.loser = self._first_name
        self.take_over()
        late.on_overtaken()
        self._first.fail(OVERTAKEN, "another endpoint answered first")
        self._client.set_source(self._source)
        return True

    def take_over(self) -> None:
        """Make the second attempt the only attempt of the request."""
        exchange = self._exchange
        self.is_won = True
        exchange.reservation, exchange.relay = self.reservation, self._relay
        exchange.sent_request, exchange.pick = self._sent, self._pick
        self._client.set_source(self._source)

    def _on_first_token(self) -> None:
        if self._try_win():
            self._exchange.on_first_token()

    def _on_lost(self) -> None:
        self.close()
        self._exchange.on_first_token()

    def close(self) -> None:
        """Cancel the second attempt, unless it already serves the request."""
        if self.is_won or self.is_over:
            return
        self.is_over = True
        self.loser = self.reservation.endpoint.name
        if self._task is not None:
            self._task.cancel()
        self.reservation.__exit__()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        # End the race when the second attempt ends without having won; the first one continues.
        error = None if task.cancelled() else task.exception()
        if self.is_won or self.is_over:
            return
        if isinstance(error, UpstreamError):
            self.reservation.on_failed(error)
        self.close()

    async def finish(self, problem: UpstreamError) -> UpstreamError | None:
        """Let the second attempt serve the request, because the first one has ended with `problem`.

        Returns None if the second attempt served the request, and its error if it failed. Returns
        `problem` if the second attempt had ended before, or cannot replace the first one.
        """
        if self.is_over:
            return problem
        if problem.kind != OVERTAKEN:
            self._exchange.retries.append(self._first_name)
        if not self.is_won:
            if self._exchange.is_committed:
                # The client has a part of the first answer, and lacks what the second one has sent.
                self.close()
                return problem
            self.take_over()
        assert self._task is not None
        with self.reservation as reservation:
            try:
                await self._task
                if self._relay.is_refused or self._relay.has_error_event:
                    engine_refusal.settle_failure(
                        self._exchange, self._client, self._relay, reservation
                    )
                else:
                    self._exchange.status = 200
                    reservation.on_served(self._relay.usage)
            except UpstreamError as broke:
                reservation.on_failed(broke)
                return broke.with_traceback(None)
            finally:
                self.is_over = True
        return None


class Hedger:
    """Starts second attempts (hedges) for late requests, and moves requests from slow endpoints.

    waiting   attempts in progress; gateway/proxy/whole_request.py adds and removes them, and
              sweep() removes those whose answer has begun
    retrying  requests that may hold a retry of the retry budget, added by
              gateway/proxy/attempt_loop.py
    allowed   number of hedges that may start now without exceeding their configured share of all
              requests
    sent      number of hedges started so far
    moved     number of requests moved to another endpoint so far
    """

    __slots__ = (
        "_accounts",
        "_admission",
        "_answered",
        "_credit",
        "_endpoints",
        "allowed",
        "moved",
        "retrying",
        "sent",
        "waiting",
    )

    def __init__(
        self,
        endpoints: EndpointTable,
        admission: AdmissionController,
        accounts: Accounting,
        share: float,
    ) -> None:
        # Initialize; `share` is the maximum ratio of hedges to all requests (0 to 1).
        self._endpoints, self._admission, self._accounts = endpoints, admission, accounts
        self.waiting: dict[Exchange, HedgedRequest] = {}
        self.retrying: list[Exchange] = []
        self._answered, self._credit = 0.0, float(INITIAL_REQUESTS)
        self.allowed = share * INITIAL_REQUESTS
        self.sent = self.moved = 0

    def sweep(self, share: float, now: float) -> None:
        """Hedge or move the late requests among those that wait for their first byte.

        Call this four times a second. After a pause of the gateway itself, no request is late.

        share  largest share of all requests (0 to 1) that may be hedged
        now    monotonic time in seconds
        """
        answered, before = self._accounts.answered_count, self._answered
        self._answered = answered
        new = max(0.0, answered - before)
        paid_back = min(self._credit, new)
        self._credit -= paid_back
        self.allowed = min(MAX_ALLOWED, self.allowed + share * (new - paid_back))
        was_paused = self._endpoints.speed_monitor.was_paused(now)
        for exchange, request in tuple(self.waiting.items()):
            # The request has ended, its answer has begun, or it was retried at another endpoint.
            if exchange.status or exchange.retries or exchange.is_committed:
                del self.waiting[exchange]
            elif exchange.hedge is None and not exchange.holds_retry_turn and not was_paused:
                self._consider(request, now, share > 0)
        self._return_turns()

    def hedge_stalled(self, share: float, stalled: Sequence[LiveEndpoint], now: float) -> None:
        """Hedge or move late requests at some endpoints, without waiting for the next sweep().

        share    largest share of all requests (0 to 1) that may be hedged
        stalled  the endpoints whose prefill seems to stall
        now      monotonic time in seconds
        """
        if not stalled:
            return
        self._return_turns()
        for exchange, request in tuple(self.waiting.items()):
            if exchange.status or exchange.retries or exchange.is_committed:
                continue
            if (
                exchange.hedge is not None
                or exchange.holds_retry_turn
                or exchange.reservation is None
            ):
                continue
            if exchange.reservation.live in stalled:
                self._consider(request, now, share > 0)

    def _return_turns(self) -> None:
        for exchange in self.retrying:
            if exchange.is_committed:
                exchange.give_back_retry_turn(self._admission.retries)
        self.retrying = [exchange for exchange in self.retrying if exchange.holds_retry_turn]

    def _consider(self, entry: HedgedRequest, now: float, is_hedging: bool) -> None:
        # Hedge or move one request if it is late and another endpoint is expected to be sooner.
        exchange, client, route = entry.exchange, entry.client, entry.route
        reservation, relay = exchange.reservation, exchange.relay
        if reservation is None or relay is None or exchange.sent_at is None:
            return
        if route.split is not None:  # the model's other endpoints may only compute prompts
            return
        is_out, waited_s = reservation.is_ejected_as_slow, now - exchange.sent_at
        if not is_out and waited_s < LEAST_LATE_S:
            return
        live, monitor = reservation.live, self._endpoints.speed_monitor
        can_hedge = is_hedging and self.allowed >= 1.0 and may_hedge(client, route)
        is_suspect, is_doubted = live.speed.verdict is SpeedVerdict.SUSPECT, live.is_doubted
        if not (is_out or is_suspect or is_doubted or can_hedge):
            return
        left_s = monitor.predict_remaining_s(reservation, waited_s, now, is_doubted=is_doubted)
        if left_s is None and not is_out:
            return
        best = self._find_soonest(exchange, reservation)
        connections = reservation.upstream.connections
        connection = next((found for found in connections if found.is_relaying(relay)), None)
        if best is None or connection is None:
            return
        candidate, expected_s = best
        if is_doubted and hardware_key(candidate.endpoint) != hardware_key(reservation.endpoint):
            is_doubted = False  # faster hardware answers sooner even if the endpoint is healthy
            left_s = monitor.predict_remaining_s(reservation, waited_s, now, is_doubted=False)
        leaves_queue = is_doubted and reservation.is_behind
        speedup = 1.0 if leaves_queue else SPEEDUP
        moves = is_out or is_suspect or leaves_queue
        if not is_out and (left_s is None or left_s < speedup * expected_s):
            return
        if moves or can_hedge:
            self._hedge_or_move(entry, connection, candidate, moves=moves)

    def _hedge_or_move(
        self,
        entry: HedgedRequest,
        connection: UpstreamConnection,
        candidate: Candidate,
        *,
        moves: bool,
    ) -> None:
        # Move a request, or hedge it at the candidate, if the retry budget permits it.
        exchange = entry.exchange
        if exchange.reservation is None or not self._admission.retries.try_acquire():
            return
        exchange.holds_retry_turn = True
        self.retrying.append(exchange)
        if moves:
            self.moved += 1
            exchange.reservation.on_overtaken()
            connection.fail(SLOW, "the endpoint is slow")
        else:
            self._hedge(entry, connection, candidate)

    def _hedge(self, entry: HedgedRequest, first: UpstreamConnection, candidate: Candidate) -> None:
        exchange, client = entry.exchange, entry.client
        assert exchange.pick is not None
        assert exchange.call is not None
        self.allowed -= 1.0
        self.sent += 1
        self._accounts.count_hedge(candidate.endpoint.name)
        cached = () if exchange.first_query is None else exchange.first_query.cached_by_slot
        pick = repick(exchange.pick, candidate, cached)
        reservation = self._endpoints.reserve(pick, exchange.call.request, exchange.fingerprint)
        served = entry.route.resolve_name(candidate.endpoint)
        race = exchange.hedge = Race(exchange, client, first, pick, reservation, served)
        try:
            race.start()
        except BaseException:
            race.close()
            raise

    def _find_soonest(
        self, exchange: Exchange, reservation: Reservation
    ) -> tuple[Candidate, float] | None:
        # Return the endpoint that is expected to answer soonest, and in how many seconds.
        #
        # Candidates are the endpoints that the policy considered for the first attempt. The result
        # is None if there is no other.
        assert exchange.call is not None
        request = exchange.call.request
        cached = () if exchange.first_query is None else exchange.first_query.cached_by_slot
        best: tuple[Candidate, float] | None = None
        for candidate in () if exchange.pick is None else exchange.pick.candidates:
            load, endpoint = candidate.load, candidate.endpoint
            if endpoint is reservation.endpoint or not load.is_available:
                continue
            if load.in_flight >= min(endpoint.max_concurrency, load.soft_cap):
                continue
            cached_tokens = cached[load.slot] if load.slot < len(cached) else 0
            tokens = load.prefill_tokens + max(1, request.prompt_tokens - cached_tokens)
            expected_s = self._endpoints.predict_first_byte_s(load.slot, request, tokens)
            if expected_s is not None and (best is None or expected_s < best[1]):
                best = candidate, expected_s
        return best


def may_hedge(client: Client, route: HedgedRoute) -> bool:
    """Return whether a request may be sent to two endpoints at the same time.

    The client may have turned hedging off. Models that resume broken streams are never hedged,
    because the tokens that the client has received are recorded for one endpoint only.
    """
    return route.resume is None and client.headers.get(HEDGE_HEADER) != "off"
