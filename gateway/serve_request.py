"""The request path: one request from its first byte to the end of its answer. Read this file first.

    authenticate -> read -> parse -> admit (a permit until the last byte)
        -> attempts: pick AND reserve capacity in one turn of the event loop, send, relay -> account

A permit lets one request proceed. A pool has as many permits as its endpoints can run requests.
The prompt is hashed after the request has its permit, to pick an endpoint by cached prefixes. While
requests wait in the pool's queue, it is hashed before, because admission control then considers how
much of the prompt is cached.

The stages are plain calls, in order. A retry is possible until the first byte reaches the client.
After that, another endpoint can continue the answer (proxy/resume.py), or it ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.model_alias_lookup import find
from gateway.http.client_interface import Client
from gateway.metrics.metric_types import Histogram
from gateway.protocol.api_table import Api
from gateway.protocol.cors import CorsLines, CorsRule
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.forwarded_headers import TrustedProxies, proxy_request_id
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import RequestPreferences
from gateway.proxy import tier_fallback
from gateway.proxy.attempt_loop import attempts
from gateway.proxy.engine_api import call_for_engines
from gateway.proxy.resume import continue_stream
from gateway.proxy.retry_permission import end_retries
from gateway.proxy.split_request import SplitAttempts, SplitPlan
from gateway.proxy.stored_responses import explain_missing, pin_route, serve_stored
from gateway.proxy.whole_request import UncountedPlan, WholePlan
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway, ModelScope, Route, Snapshot
from gateway.telemetry.slo_outcomes import admission_outcome
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Request, RoutingQuery

log = logging.getLogger("penstock")

Handler = Callable[[Gateway, Exchange, Client], Coroutine[Any, Any, None]]

ID_BYTES, IDS_AT_ONCE = (
    16,
    64,
)  # random bytes of a request id; ids for which they are drawn together
GAPS_EVERY = 32  # one request in this many has the times between its stream's chunks measured


class RequestFactory:
    """Creates the record (exchange) of every request of this process, and serves the request.

    Request ids have a fixed length and cannot be guessed. An engine may abort the request whose id
    begins with a given text, so a guessed id could end the request of another client.
    """

    __slots__ = ("_count", "_gaps", "_gateway", "_ids", "_proxies")

    def __init__(
        self, gateway: Gateway, gaps: Histogram, proxies: TrustedProxies | None = None
    ) -> None:
        """Create a factory that makes the record of each new request.

        gaps     the histogram of the times between a stream's chunks
        proxies  the proxies that may state the client's address in headers
        """
        self._proxies = proxies
        self._gateway = gateway
        self._gaps = gaps
        self._ids: list[str] = []  # ids of the next requests
        self._count = 0

    def serve(self, client: Client, api: Api) -> Coroutine[Any, Any, None]:
        """Return the coroutine that serves a request whose head has been parsed."""
        self._count = count = self._count + 1
        ids = self._ids
        request_id = ids.pop() if ids else self._new_id()
        exchange = Exchange(request_id, api, client.address, monotonic())
        proxies = self._proxies
        if proxies is not None and proxies.is_proxy(client.address):
            exchange.client = proxies.client_address(client.headers, client.address)
            exchange.proxy_request_id = proxy_request_id(client.headers)
        gateway = self._gateway
        tracer = gateway.accounts.tracer
        if tracer is not None:
            exchange.trace = tracer.start_trace(client.headers)
        if not count % GAPS_EVERY:
            exchange.gaps = self._gaps
        return serve(gateway, exchange, client, _handle if api.conversation else serve_stored)

    def _new_id(self) -> str:
        ids = self._ids
        if not ids:
            digits = secrets.token_bytes(ID_BYTES * IDS_AT_ONCE).hex(" ", ID_BYTES)
            ids += ("req_" + digits.replace(" ", " req_")).split()
        return ids.pop()

    def serve_for(
        self, tenant: str, client: Client, api: Api
    ) -> tuple[Exchange, Coroutine[Any, Any, None]]:
        """Return the record and the serving coroutine of a request that was authenticated earlier.

        It is used for requests of a batch. `tenant` is the owner of the batch; "" if the API needs
        no key.
        """
        self._count += 1
        exchange = Exchange(self._new_id(), api, client.address, monotonic())
        exchange.tenant = tenant
        return exchange, serve(self._gateway, exchange, client, _handle)


class CorsRequestFactory(RequestFactory):
    """A RequestFactory whose responses have CORS headers for permitted web pages."""

    __slots__ = ("_cors",)

    def __init__(
        self,
        gateway: Gateway,
        gaps: Histogram,
        proxies: TrustedProxies | None,
        cors: CorsRule,
    ) -> None:
        super().__init__(gateway, gaps, proxies)
        self._cors = cors

    def serve(self, client: Client, api: Api) -> Coroutine[Any, Any, None]:
        client.response_lines = CorsLines(client.clock, self._cors.response_headers(client.headers))
        return super().serve(client, api)


def create_request_factory(
    gateway: Gateway, gaps: Histogram, proxies: TrustedProxies | None, cors: CorsRule | None
) -> RequestFactory:
    """Create the factory. `cors` is None if no web page of another origin may call the API."""
    if cors is None:
        return RequestFactory(gateway, gaps, proxies)
    return CorsRequestFactory(gateway, gaps, proxies, cors)


async def serve(gateway: Gateway, exchange: Exchange, client: Client, handle: Handler) -> None:
    """Serve one request of a client, from authentication to accounting.

    In any case, the client gets one answer and the exchange is accounted once.
    """
    try:
        await handle(gateway, exchange, client)
    except GatewayError as error:
        if error.failure is Failure.RESPONSE_NOT_FOUND:
            error = await explain_missing(gateway, exchange, error)
        exchange.set_refused(error)
        client.send_error(error, exchange.id, exchange.api.errors)
    except asyncio.CancelledError:
        exchange.set_cancelled()
        raise
    except Exception:
        log.exception("serving request %s failed because of an internal error", exchange.id)
        exchange.set_internal_error()
        _answer_internal_error(exchange, client)
    finally:
        if exchange.body_budget is not None:
            exchange.release_memory()
        try:
            if exchange.holds_retry_turn:
                end_retries(gateway, exchange)
            if exchange.quota is not None or exchange.pool_queue is not None:  # rare
                _report_outcome(gateway, exchange)
        finally:
            gateway.accounts.add_ended(exchange)


async def _handle(gateway: Gateway, exchange: Exchange, client: Client) -> None:
    snapshot, gate = gateway.snapshot, gateway.gate
    if snapshot.tenants:
        exchange.tenant = exchange.tenant or snapshot.authenticate(client.headers)
    preferences = snapshot.service_classes.read_preferences(client.headers, exchange.tenant)
    exchange.client_request_id = preferences.client_request_id
    body = client.take_buffered_body() or await _receive_body(gateway, exchange, client)
    exchange.received_at = received_at = monotonic()
    exchange.take_memory(gate.bodies, len(body))
    models = snapshot.scope(client.headers) if snapshot.scopes else snapshot
    route, call = _parse(gateway, snapshot, models, exchange, body, preferences, received_at)
    del body  # the call owns the bytes, and releases them when no retry can need them
    if gate.quotas.by_tenant:
        is_live = exchange.api.is_admitted and not preferences.is_batch
        exchange.quota = gate.quotas.take(call.request, is_concurrent=is_live)
    if route.canary is not None:
        route = route.canary.choose(exchange, call.request, route)
    exchange.model = route.name
    if gateway.mirrors is not None:
        gateway.mirrors.offer(exchange, route.pool, call)
    exchange.parsed_at = admitted_at = monotonic()
    if not exchange.api.is_admitted:
        await _serve_uncounted(gateway, exchange, client, route, call)
        return
    if preferences.has_short_deadline or not route.pool_queue.try_take():
        route = await _admit(gateway, snapshot, exchange, route, call, preferences.skips_queue)
        admitted_at = monotonic()
    queue = route.pool_queue
    try:  # compiled, `with` costs ten times as much as this
        exchange.admitted_at = admitted_at
        if route.fingerprints and exchange.fingerprint is None and exchange.api.generates:
            _set_fingerprint(gateway, exchange, route, call)
        if call.api.keeps_answers:
            route = pin_route(gateway, snapshot, models, exchange, route, call)
        if route.split is None:
            problem = await attempts(WholePlan(gateway, exchange, client, route, call))
        else:
            plan: SplitAttempts = SplitPlan(gateway, exchange, client, route, call, route.split)
            problem = await attempts(plan)
        if problem is not None:
            await continue_stream(gateway, exchange, client, route, call, problem)
    finally:
        queue.leave()


def _parse(
    gateway: Gateway,
    snapshot: Snapshot,
    models: Snapshot | ModelScope,
    exchange: Exchange,
    body: bytes,
    preferences: RequestPreferences,
    received_at: float,
) -> tuple[Route, Call]:
    # Parse a request's body; return the route of its model, and the call for that model's engines.
    tracker = gateway.accounts.slo_tracker
    caller = CallContext(
        exchange.id,
        exchange.tenant,
        preferences,
        received_at,
        tracker.output_lengths,
        snapshot.salts,
        tracker.prompt_lengths,
    )
    try:
        call = exchange.call = parse_call(
            body, exchange.api, models.routes, caller, models.unlisted, models.shapes
        )
    except GatewayError as error:
        raise _with_reason(error, snapshot) from None
    route = models.routes[call.requested_model]
    if not call.api.is_plain or route.unserved or not call.api.takes_salt:
        call = exchange.call = call_for_engines(gateway, exchange, route, call, caller)
    return route, call


def _with_reason(error: GatewayError, snapshot: Snapshot) -> GatewayError:
    # Return the error for the client: while no model is known at all, any name may become known.
    if error.failure is not Failure.MODEL_NOT_FOUND or snapshot.routes or snapshot.unlisted:
        return error
    message = "No engine has listed a model yet."
    return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)


def _set_fingerprint(gateway: Gateway, exchange: Exchange, route: Route, call: Call) -> None:
    # Compute the fingerprint of the prompt, and recognise the session that it continues.
    prefixes = gateway.endpoints.prefixes
    exchange.fingerprint = prefixes.fingerprint(call, route.name)
    if route.pool_queue.reads_sessions:
        prefixes.recognise_session(call, exchange.fingerprint)


async def _serve_uncounted(
    gateway: Gateway, exchange: Exchange, client: Client, route: Route, call: Call
) -> None:
    # Serve a request that computes no tokens, without waiting for admission.
    exchange.admitted_at = exchange.parsed_at
    problem = await attempts(UncountedPlan(gateway, exchange, client, route, call))
    if problem is not None:
        await continue_stream(gateway, exchange, client, route, call, problem)


async def _receive_body(gateway: Gateway, exchange: Exchange, client: Client) -> bytes:
    # Receive the rest of a body that did not arrive completely with its head.
    #
    # A large body waits until it may be parsed.
    bodies = gateway.gate.bodies
    payer = exchange.tenant or exchange.client
    return await client.read_body(
        partial(exchange.take_memory, bodies), partial(bodies.large_bodies.join_in_turn, payer)
    )


async def _admit(
    gateway: Gateway,
    snapshot: Snapshot,
    exchange: Exchange,
    route: Route,
    call: Call,
    skips_queue: bool,
) -> Route:
    # Wait for admission; return the route that admitted the request: its own or, if its own pool
    # refuses it, the route of a smaller model.
    #
    # Raises GatewayError if the request is refused.
    fingerprint = exchange.fingerprint = _fingerprint(gateway, route, call)
    if fingerprint is not None and route.pool_queue.reads_sessions:
        gateway.endpoints.prefixes.recognise_session(call, fingerprint)
    if skips_queue:
        exchange.pool_queue = await route.pool_queue.enter_first()
        return _current_route(gateway, snapshot, exchange, route, call)
    # No closure: in a compiled module it would form a reference cycle with this coroutine, and keep
    # an old snapshot.
    build_query = partial(_build_query, gateway.endpoints, call.request, fingerprint)
    try:
        exchange.pool_queue = await route.pool_queue.enter(
            build_query(0.0), None if fingerprint is None else build_query
        )
    except GatewayError:
        tier = tier_fallback.pick_tier(gateway.endpoints, snapshot.routes, route, call)
        if tier is None:
            raise
        exchange.model = exchange.tier = tier.name
        exchange.fingerprint = None
        return tier
    return _current_route(gateway, snapshot, exchange, route, call)


def _fingerprint(gateway: Gateway, route: Route, call: Call) -> Fingerprint | None:
    # Return the prompt's fingerprint, or None if nothing needs it.
    #
    # A fingerprint is needed if the policy reads it and the API generates text.
    if not route.fingerprints or not call.api.generates:
        return None
    return gateway.endpoints.prefixes.fingerprint(call, route.name)


def _build_query(
    endpoints: EndpointTable, request: Request, fingerprint: Fingerprint | None, _: float
) -> RoutingQuery:
    # Return the routing query of a waiting request, with the present state of the prefix index.
    return endpoints.build_query(request, fingerprint, ())


def _current_route(
    gateway: Gateway, snapshot: Snapshot, exchange: Exchange, route: Route, call: Call
) -> Route:
    # Return the current route of a request that has waited, because a reload may have replaced it.
    #
    # The request's permit counts the endpoints of the current route. If the model name now belongs
    # to another model or queue, the earlier route is kept.
    current = find(gateway.snapshot.routes, call.requested_model)
    if gateway.snapshot is snapshot or current is None:
        return route
    if (current.name, current.pool_queue) != (route.name, route.pool_queue):
        return route
    exchange.canary_arm = None
    if current.canary is None:
        return current
    return current.canary.choose(exchange, call.request, current)


def _report_outcome(gateway: Gateway, exchange: Exchange) -> None:
    # Report how the request ended to its tenant's quota and to the queue that admitted it.
    if exchange.call is None:
        return
    request = exchange.call.request
    if exchange.quota is not None and not gateway.background.follow(exchange):
        output_tokens = None
        if exchange.outcome != "refused":
            output_tokens = admission_outcome(exchange).output_tokens
        prompt_tokens = None if exchange.relay is None else exchange.relay.usage.prompt_tokens
        gateway.gate.quotas.settle(exchange.quota, request, output_tokens, prompt_tokens)
    if exchange.pool_queue is None:
        return
    if exchange.first_query is not None:
        exchange.pool_queue.on_finished(request, partial(admission_outcome, exchange))
    else:
        exchange.pool_queue.on_not_routed(request)


def _answer_internal_error(exchange: Exchange, client: Client) -> None:
    if exchange.is_committed:
        client.close_after_write()
    else:
        error = GatewayError(Failure.INTERNAL, "The gateway failed on this request.")
        client.send_error(error, exchange.id, exchange.api.errors)
