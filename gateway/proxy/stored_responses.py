"""Requests about responses that an engine stores: continue, read, cancel or delete one.

Engines store responses in the memory of one process. Therefore a request goes to the endpoint that
the response's id contains (gateway/protocol/stored_response_ids.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.model_alias_lookup import find
from gateway.forwarding import engine_refusal, forward
from gateway.forwarding.engine_request_headers import engine_request_head
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.forwarding.response_headers import response_headers
from gateway.http.client_interface import Client
from gateway.protocol.api_table import RESPONSES
from gateway.protocol.errors import Failure, GatewayError, response_not_found
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.json_members import bad_request, member_value
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response_store_probe import shows_store, store_request
from gateway.request_record import Exchange, StoredAt
from gateway.routes_and_snapshot import Gateway, ModelScope, Route, Snapshot

PREVIOUS = "previous_response_id"
_TARGET = re.compile(
    r"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel)?(\?[A-Za-z0-9._~%&=+,\[\]-]{0,512})?"
)


class _Bytes(NamedTuple):
    """A request body in memory that implements RequestPayload. It is kept after it was sent."""

    body: bytes


def may_store(gateway: Gateway, route: Route) -> bool:
    """Return whether any endpoint of the route may store responses.

    An endpoint counts as long as its engine is not known to store none.
    """
    slots = {candidate.load.slot for candidate in route.candidates}
    return any(
        live.keeps_responses is not False
        for live in gateway.endpoints.all()
        if live.load.slot in slots
    )


def pin_route(
    gateway: Gateway,
    snapshot: Snapshot,
    models: Snapshot | ModelScope,
    exchange: Exchange,
    route: Route,
    call: Call,
) -> Route:
    """Restrict the route of a request to the one endpoint that stores its previous response.

    Without a previous response, `route` is returned unchanged. Sets `exchange.response_ids`, which
    makes the id of the new response. Raises GatewayError if the previous id is unknown, or belongs
    to another tenant or to a model that the API key may not use.

    models  the models that the request's API key may use
    """
    ids = exchange.response_ids = snapshot.response_ids
    previous = member_value(call.members, PREVIOUS) if PREVIOUS in call.members else None
    if previous is None or ids is None:
        return route
    if not isinstance(previous, str):
        raise bad_request(f"'{PREVIOUS}' must be a string.", PREVIOUS)
    names = [candidate.endpoint.name for candidate in route.candidates]
    kept = ids.find(previous, exchange.tenant, names)
    if kept is None and not may_store(gateway, route):
        raise _stores_nothing()
    if kept is None or not _is_permitted(models, kept.model):
        raise response_not_found(previous)
    exchange.stored_at = StoredAt(previous, kept.endpoint, route.name)
    candidates = tuple(
        candidate for candidate in route.candidates if candidate.endpoint.name == kept.endpoint
    )
    return replace(route, candidates=candidates, split=None)


async def explain_missing(
    gateway: Gateway, exchange: Exchange, error: GatewayError
) -> GatewayError:
    """Return the client's error after an engine did not find the response to be continued.

    The result is `error`, or an error that says that the engine stores no responses at all.
    """
    stored = exchange.stored_at
    if stored is None or exchange.api is not RESPONSES:
        return error
    live = _live(gateway.endpoints.all(), stored.endpoint)
    if live is None or await _keeps_responses(gateway, live, stored.model):
        return error
    return _stores_nothing()


def _stores_nothing() -> GatewayError:
    # Return the error for a previous response where the engines store none at all.
    return GatewayError(
        Failure.BAD_REQUEST,
        f"The engine does not store responses, so '{PREVIOUS}' cannot be used: send the whole "
        "conversation in 'input'. (vLLM keeps them with VLLM_ENABLE_RESPONSES_API_STORE=1.)",
        param=PREVIOUS,
    )


async def serve_stored(gateway: Gateway, exchange: Exchange, client: Client) -> None:
    """Read, cancel or delete a stored response at the engine that stores it.

    Raises GatewayError if the response or its endpoint cannot be found.
    """
    snapshot = gateway.snapshot
    if snapshot.tenants:
        exchange.tenant = snapshot.authenticate(client.headers)
    await client.read_body(partial(exchange.take_memory, gateway.gate.bodies))
    exchange.received_at = exchange.parsed_at = monotonic()
    match = _TARGET.fullmatch(client.target)
    response_id = "" if match is None else match[1]
    ids, endpoints = snapshot.response_ids, gateway.endpoints.all()
    names = [live.endpoint.name for live in endpoints]
    kept = None if ids is None else ids.find(response_id, exchange.tenant, names)
    live = None if kept is None else _live(endpoints, kept.endpoint)
    models = snapshot.scope(client.headers)
    if kept is None or live is None or not _is_permitted(models, kept.model):
        raise response_not_found(response_id)
    exchange.stored_at = StoredAt(response_id, kept.endpoint, kept.model)
    relay = _relay(gateway, exchange, client, live)
    try:
        await _send(gateway, exchange, client, live, relay)
    except UpstreamError as broke:
        gateway.endpoints.on_failure(live, broke)
        if not relay.is_committed:
            message = f"The engine could not answer ({broke.kind})."
            raise GatewayError(Failure.UPSTREAM_FAILED, message) from None
        client.close_after_write()
        exchange.set_interrupted(broke.kind)


async def _send(
    gateway: Gateway, exchange: Exchange, client: Client, live: LiveEndpoint, relay: Relay
) -> None:
    # Send the request to the engine that stores the response, and relay its answer.
    stored, api = exchange.stored_at, exchange.api
    assert stored is not None
    _, mark, query = client.target.partition("?")
    path = api.path.replace("{id}", stored.response_id) + mark + query
    start = api.method.encode() + live.upstream.request_head(path).removeprefix(b"POST")
    head = engine_request_head(start, exchange, client.headers, 0, stored.endpoint)
    exchange.sent_at = monotonic()
    await live.upstream.send(head, _Bytes(b""), relay, client)
    if relay.is_refused:
        engine_refusal.forward_refusal(exchange, client, relay, stored.endpoint)
        return
    exchange.status = 200
    has_ended = api.method != "GET" or relay.usage.completion_tokens is not None
    if has_ended:
        gateway.background.on_ended(stored.response_id)


def _relay(gateway: Gateway, exchange: Exchange, client: Client, live: LiveEndpoint) -> Relay:
    # Return the relay for a stored response, which restores the client's name of the model.
    stored = exchange.stored_at
    assert stored is not None
    assert RESPONSES.grammar is not None
    route = gateway.snapshot.routes.get(stored.model) if stored.model else None
    rewriter = None
    if route is not None:
        served = route.resolve_name(live.endpoint)
        rewriter = forward.new_rewriter(live.endpoint.engine, RESPONSES, served, stored.model)
    headers = response_headers(exchange, client, stored.endpoint)
    grammar, errors = RESPONSES.grammar, RESPONSES.errors
    relay = NamedEventRelay(headers, None, client.is_http_1_0, rewriter, None, grammar, errors)
    relay.asked_at = exchange.accepted_at
    return relay


async def _keeps_responses(gateway: Gateway, live: LiveEndpoint, model: str) -> bool:
    # Return whether the engine stores responses, by a request that computes nothing.
    #
    # The result is True if the engine's answer does not show it.
    route = gateway.snapshot.routes.get(model)
    name = live.endpoint.name if route is None else route.resolve_name(live.endpoint)
    body = msgspec.json.encode(store_request(name))
    head = live.upstream.request_head(RESPONSES.path)
    head += b"content-length: %d\r\n\r\n" % len(body)
    relay = Relay(b"", is_http_1_0=True)
    try:
        await live.upstream.send(head, _Bytes(body), relay, InternalAnswer())
    except UpstreamError:
        return True
    return shows_store(relay.status, relay.refusal_body) is not False


def _is_permitted(models: Snapshot | ModelScope, model: str) -> bool:
    # Return whether an API key that may use `models` may use the stored responses of `model`.
    #
    # A response whose id does not contain the model's name is only for keys that may use all
    # models.
    return isinstance(models, Snapshot) or find(models.routes, model) is not None


def _live(endpoints: Sequence[LiveEndpoint], name: str) -> LiveEndpoint | None:
    return next((live for live in endpoints if live.endpoint.name == name), None)
