"""The admin pages of endpoints: GET /endpoints, and POST /endpoints/{name}/drain and /undrain.

The page /endpoints shows the state, load and KV events of each endpoint, and counts of split
requests. To drain an endpoint means to send it no new requests. live_fleet_status.py makes other
rows, for the live view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface
    from gateway.fleet.live_endpoint import LiveEndpoint
    from gateway.routes_and_snapshot import Gateway

ROWS_PER_TURN = 64
DRAINED_STATES = frozenset({"draining", "drained"})
"""States of endpoints to which an operator has stopped new requests."""
RowT = TypeVar("RowT")


def add_endpoints(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    """Add the page /endpoints, and those that drain an endpoint, to the admin server's `routes`."""

    async def endpoints(_: web.Request) -> web.Response:
        rows = await endpoint_rows(target.gateway)
        content = {"endpoints": rows, "splits": _splits(target), "pairs": _pairs(target)}
        return web.Response(body=msgspec.json.encode(content), content_type="application/json")

    routes.add_get("/endpoints", endpoints)
    routes.add_post("/endpoints/{name}/{what:drain|undrain}", _drain_handler(target))


def _drain_handler(target: GatewayInterface) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def drain(request: web.Request) -> web.Response:
        name, is_drained = request.match_info["name"], request.match_info["what"] == "drain"
        # An endpoint that is being removed may have the same name as its replacement.
        endpoints = (live for live in target.gateway.endpoints.all() if not live.is_leaving)
        match = next((live for live in endpoints if live.endpoint.name == name), None)
        if match is None:
            return web.json_response(
                {"result": "nothing", "message": f"no endpoint is named {name!r:.80}"}, status=404
            )
        in_flight = target.gateway.endpoints.set_drained(match, is_drained)
        return web.json_response(
            {"result": "applied", "endpoint": name, "drained": is_drained, "in_flight": in_flight}
        )

    return drain


async def endpoint_rows(gateway: Gateway) -> list[dict[str, object]]:
    """Return one dict per endpoint with its name and state, as the page /endpoints shows it."""
    now, exact = monotonic(), gateway.endpoints.prefixes.exact
    return await in_turns(
        gateway.endpoints.all(),
        lambda live: _endpoint_row(live, now) | _event_row(exact, live, now),
    )


async def in_turns(
    lives: Sequence[LiveEndpoint], build: Callable[[LiveEndpoint], RowT]
) -> list[RowT]:
    """Build a table row for each endpoint; after every few rows, let the event loop serve requests.

    lives  the endpoints
    build  function that makes the row of one endpoint
    """
    rows: list[RowT] = []
    for begin in range(0, len(lives), ROWS_PER_TURN):
        if begin:
            await asyncio.sleep(0)
        rows += map(build, lives[begin : begin + ROWS_PER_TURN])
    return rows


def endpoint_state(live: LiveEndpoint) -> str:
    """Return an endpoint's state in one word, as the admin pages show it.

    leaving   it is no longer in the configuration, but older requests still run there
    draining  an operator has stopped new requests to it, and older ones still run
    drained   an operator has stopped new requests to it, and none run
    others    the result of its health checks: up, returning, ejected or dead
    """
    if live.is_leaving:
        return "leaving"
    if live.is_drained and live.load.in_flight:
        return "draining"
    return "drained" if live.is_drained else str(live.health.state)


def _endpoint_row(live: LiveEndpoint, now: float) -> dict[str, object]:
    endpoint, load, health = live.endpoint, live.load, live.health
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "pool": endpoint.pool,
        "role": endpoint.role,
        "engine": endpoint.engine,
        "rank": endpoint.rank,
        "layout": {
            "tp": endpoint.layout.tp,
            "pp": endpoint.layout.pp,
            "ep": endpoint.layout.ep,
            "dp": endpoint.layout.dp,
        },
        "labels": dict(endpoint.labels),
        "max_concurrency": endpoint.max_concurrency,
        "kv_tokens": load.kv_tokens or None,
        "available": load.is_available,
        "state": endpoint_state(live),
        "cause": live.cause,
        "slow": None if live.speed.slowness is None else msgspec.to_builtins(live.speed.slowness),
        "back_in_s": max(0.0, round(health.until - now, 3)) if not load.is_available else None,
        "in_flight": load.in_flight - load.peer_load.in_flight,
        "in_flight_elsewhere": load.peer_load.in_flight,
        "held_tokens": round(load.prefix_cache_tokens),
        "prefill_tokens": load.prefill_tokens,
        "decode_tokens": load.decode_tokens,
        "expected_tokens": load.expected_tokens,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "scrape_age_s": None if load.scraped_at is None else round(now - load.scraped_at, 3),
        "connections": len(live.upstream.connections),
    }


def _event_row(exact: ExactPrefixes, live: LiveEndpoint, now: float) -> dict[str, object]:
    # Return the part of an endpoint's row about its KV events; empty for one without events.
    endpoint = exact.endpoints.get(live.load.slot)
    if endpoint is None:
        return {}
    return {
        "prefix_cache": exact.describe(live.load.slot, now),
        "kv_events": {
            "audits": endpoint.audits,
            "errors": endpoint.errors,
            "ranks": [
                {
                    "state": source.state,
                    "blocks": len(source.blocks),
                    "block_tokens": source.block_tokens,
                    "batches": source.batches,
                    "gaps": source.gaps,
                    "duplicates": source.duplicates,
                    "restarts": source.restarts,
                }
                for source in endpoint.sources
            ],
        },
    }


def _splits(target: GatewayInterface) -> list[dict[str, object]]:
    routes = {route.name: route for route in target.gateway.snapshot.routes.values()}
    return [
        {
            "model": name,
            "dialect": route.split.dialect.name,
            "compat": group.compat,
            "prefill": [live.endpoint.name for live in group.prefills],
            "decode": [live.endpoint.name for live in group.decodes],
        }
        for name, route in sorted(routes.items())
        if route.split is not None
        for group in route.split.pools.groups
    ]


def _pairs(target: GatewayInterface) -> list[dict[str, object]]:
    return [
        {
            "prefill": prefill,
            "decode": decode,
            "served": figures.served,
            "failed": figures.failed,
            "handoff_s": None if figures.handoff_s is None else round(figures.handoff_s, 6),
            "transport": figures.transport,
        }
        for (prefill, decode), figures in sorted(target.gateway.handoffs.pairs.items())
    ]
