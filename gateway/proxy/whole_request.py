"""The plan for a whole request: one endpoint computes the prompt and generates the answer."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from msgspec.structs import replace

from gateway.fleet.reservation import Reservation
from gateway.forwarding.engine_refusal import settle_failure
from gateway.forwarding.hedge import OVERTAKEN
from gateway.http.client_interface import Client
from gateway.protocol.request.api_call import Call
from gateway.protocol.response.relay import UpstreamError
from gateway.proxy.context_length import is_too_long
from gateway.proxy.final_errors import no_endpoint_error
from gateway.proxy.retry_permission import permit_retry
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway, Route
from policies import routing_algorithm
from policies.filters import below_cap, fits_context, serves_tenant
from policies.policy_types import Policy
from policies.routing_types import Candidate, Pick, RoutingQuery

# An admitted request may find an endpoint above its limit after a refusal by one of these filters.
# Endpoints with free places may fail the first two where one without free places passes them.
_OVERRULED = (fits_context.__name__, serves_tenant.__name__, below_cap.__name__)


class WholePlan:
    """A request that is not split, attempted at one endpoint after another until its answer begins.

    If the first byte is late, forwarding/hedge.py uses this plan to start a second attempt in
    parallel (a hedge).

    query  the policy's input at the newest choice of an endpoint
    """

    __slots__ = ("call", "client", "exchange", "gateway", "query", "route")

    def __init__(
        self, gateway: Gateway, exchange: Exchange, client: Client, route: Route, call: Call
    ) -> None:
        self.gateway = gateway
        self.exchange = exchange
        self.client = client
        self.route = route
        self.call = call

    def choose(self, left_out: Sequence[str]) -> Pick | None:
        route, endpoints = self.route, self.gateway.endpoints
        request, fingerprint, order = self.call.request, self.exchange.fingerprint, self.route.order
        if order is None:
            query = self.query = endpoints.build_query(request, fingerprint, left_out)
            pick = routing_algorithm.pick(route.policy, query, route.candidates)
        else:
            query = self.query = endpoints.build_query(
                request, fingerprint, left_out, in_order=True
            )
            pick = order.pick(query)
        return pick or pick_over_cap(route, query, self.call)

    async def attempt(self, pick: Pick) -> UpstreamError | None:
        exchange: Exchange = self.exchange
        gateway, route = self.gateway, self.route
        exchange.pick = pick
        exchange.picked_at = monotonic()
        if route.notes_picks:
            self._record_pick(pick)
        reservation: Reservation = gateway.endpoints.reserve(
            pick, self.call.request, exchange.fingerprint
        )
        waiting = gateway.hedger.waiting
        try:  # compiled, `with` costs ten times as much as this
            exchange.on_reserved(route.pool_queue, self.query, pick)
            waiting[exchange] = self
            head, body, relay = route.prepare(
                exchange,
                self.call,
                self.client,
                reservation,
                exchange.on_first_token,
                route.resolve_name(reservation.endpoint),
            )
            exchange.reservation = reservation
            exchange.relay = relay
            exchange.sent_request = body
            exchange.sent_at = monotonic()
            await reservation.upstream.send(head, body, relay, self.client)
            if relay.is_refused or relay.has_error_event:
                settle_failure(exchange, self.client, relay, reservation)
            else:
                exchange.status = 200
                reservation.on_served(relay.usage)
        except UpstreamError as broke:
            if broke.kind != OVERTAKEN:
                reservation.on_failed(broke)
            # The error's traceback refers to this frame and its callers, a reference cycle.
            return broke.with_traceback(None)
        finally:
            waiting.pop(exchange, None)
            reservation.close()
        return None

    def _record_pick(self, pick: Pick) -> None:
        # Record the endpoints' load before the reservation, to explain the pick later.
        #
        # Shadow policies use the record too.
        exchange, route, query = self.exchange, self.route, self.query
        self.gateway.accounts.on_pick(exchange, route.policy, query, pick)
        if route.shadows is not None and route.split is None:
            route.shadows.on_pick(exchange, route, query, pick)

    async def may_retry(self, problem: UpstreamError) -> bool:
        exchange = self.exchange
        if exchange.is_committed:
            return False
        assert exchange.pick is not None
        exchange.retries.append(exchange.pick.candidate.endpoint.name)
        await permit_retry(self.gateway, exchange, problem)
        return True

    def give_up(self, problem: UpstreamError | None) -> None:
        self.exchange.pick = None
        raise no_endpoint_error(self.exchange, self.route, self.query, problem)


class UncountedPlan(WholePlan):
    """The plan for a request that generates nothing, such as /tokenize.

    It does not wait in the admission queue, and reserves no capacity.
    """

    __slots__ = ()

    def choose(self, left_out: Sequence[str]) -> Pick | None:
        route, policy = self.route, self.route.policy
        query = self.gateway.endpoints.build_query(self.call.request, None, left_out)
        query = self.query = replace(query, computes_tokens=False)
        # The queue must not count a request that it did not admit.
        self.exchange.first_query = query
        filters = tuple(keep for keep in policy.filters if keep is not below_cap)
        return routing_algorithm.pick(replace(policy, filters=filters), query, route.candidates)


def pick_over_cap(route: Route, query: RoutingQuery, call: Call) -> Pick | None:
    """Pick an endpoint even beyond its limit of concurrent requests; its engine queues the request.

    This is for an admitted request when no endpoint has free capacity. That can happen in spite of
    admission control:

    - it counts the requests in progress per pool, not per endpoint
    - the admission policy `none` counts nothing
    - hedges (second attempts in parallel) use capacity without being admitted

    Returns None if another filter left no candidate. If the prompt is too long by an estimate,
    pick_longest() decides.
    """
    policy, candidates = route.policy, route.candidates
    if routing_algorithm.rejecting_filter(policy, query, candidates) not in _OVERRULED:
        return None
    filters = tuple(keep for keep in policy.filters if keep is not below_cap)
    pick = routing_algorithm.pick(replace(policy, filters=filters), query, candidates)
    return pick or pick_longest(policy, query, candidates, call)


def pick_longest(
    policy: Policy, query: RoutingQuery, candidates: Sequence[Candidate], call: Call
) -> Pick | None:
    """Pick the endpoint with the longest context for a prompt that may be too long.

    The gateway only estimates the number of tokens; the engine counts them and decides. Returns
    None if the estimate fits some endpoint, or if the prompt is certainly too long for every
    endpoint.
    """
    serving = serves_tenant(query, candidates)
    if not serving or fits_context(query, serving) or is_too_long(call, serving):
        return None
    longest = max(candidate.endpoint.context_tokens or 0 for candidate in serving)
    eligible = [candidate for candidate in serving if candidate.endpoint.context_tokens == longest]
    filters = tuple(keep for keep in policy.filters if keep is not fits_context)
    over_cap = tuple(keep for keep in filters if keep is not below_cap)
    return routing_algorithm.pick(
        replace(policy, filters=filters), query, eligible
    ) or routing_algorithm.pick(replace(policy, filters=over_cap), query, eligible)
