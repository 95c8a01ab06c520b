"""The admin listener: health, readiness, metrics, endpoints and the configuration. Never on the API port.

Not here: who may ask (gateway/admin/auth.py), the pages of the configuration (gateway/admin/config_pages.py) and the live view (gateway/admin/live_pages.py).
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.admin import config_pages, live_pages
from gateway.admin.auth import guard
from gateway.admin.fleet_status import state_of
from gateway.admin.readiness import obstacle
from gateway.admin.recent_requests import Query, add_requests, recent
from gateway.config.yaml_source import FILE_CAP_BYTES
from gateway.metrics.exposition import content_type, end, text, wants_openmetrics

if TYPE_CHECKING:
    from gateway.fleet.endpoint_registry import LiveEndpoint
    from gateway.live.target import AdminTarget


def application(target: AdminTarget) -> web.Application:
    """Everything it answers. The configuration's pages change something, and draining an endpoint."""
    server = web.Application(
        middlewares=[guard(lambda: target.gateway.snapshot.config)], client_max_size=FILE_CAP_BYTES + 1
    )
    _add_health(target, server.router)
    _add_state(target, server.router)
    config_pages.add(target, server.router)
    live_pages.add(target, server)
    return server


def _add_health(target: AdminTarget, routes: web.UrlDispatcher) -> None:
    """What machines ask again and again."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = obstacle(target.gateway, draining=target.draining)
        return web.Response(text="ready\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def metrics(request: web.Request) -> web.Response:
        exemplars = wants_openmetrics(request.headers.get("Accept", ""))
        page = []
        for reading in target.metrics.readings(exemplars=exemplars):
            page.append(text(reading, exemplars=exemplars))
            await asyncio.sleep(0)  # tens of milliseconds at 64 endpoints: streams go on in between
        page.append(end(exemplars=exemplars))
        return web.Response(body=b"".join(page), headers={"Content-Type": content_type(exemplars=exemplars)})

    async def readings(request: web.Request) -> web.Response:
        """What a supervisor merges, one from each worker."""
        found = []
        for reading in target.metrics.readings(exemplars="exemplars" in request.query):
            found.append(reading)
            await asyncio.sleep(0)
        return web.Response(body=msgspec.msgpack.encode(found), content_type="application/msgpack")

    routes.add_get("/healthz", healthz)
    routes.add_get("/readyz", readyz)
    routes.add_get("/metrics", metrics)
    routes.add_get("/metrics/readings", readings)


def _add_state(target: AdminTarget, routes: web.UrlDispatcher) -> None:
    """What operators ask: how things stand, and why."""

    async def endpoints(_: web.Request) -> web.Response:
        now = monotonic()
        shown = [_shown(live, now) for live in target.gateway.endpoints.all()]
        return web.json_response({"endpoints": shown, "splits": _splits(target), "pairs": _pairs(target)})

    async def shadow(_: web.Request) -> web.Response:
        tried = target.gateway.snapshot.tried.values()
        return web.json_response({"shadows": [each.shadows.told() for each in tried if each.shadows is not None]})

    async def canary(_: web.Request) -> web.Response:
        tried = target.gateway.snapshot.tried.values()
        return web.json_response({"canaries": [each.sides.told() for each in tried if each.sides is not None]})

    async def explain(request: web.Request) -> web.Response:
        asked, explained = request.match_info["id"], target.gateway.accounts.explained
        found = explained.newest() if asked == "last" else explained.find(asked)
        if found is None:
            return web.json_response({"message": "no such request among the newest that are over"}, status=404)
        return web.json_response(found)

    async def requests(query: Query) -> dict[str, object]:
        return recent(target.gateway.accounts.explained, query)

    routes.add_get("/endpoints", endpoints)
    routes.add_get("/explain/{id}", explain)
    add_requests(routes, requests)
    routes.add_get("/shadow", shadow)
    routes.add_get("/canary", canary)


def _shown(live: LiveEndpoint, now: float) -> dict[str, object]:
    endpoint, load, health = live.endpoint, live.load, live.health
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "pool": endpoint.pool,
        "role": endpoint.role,
        "engine": endpoint.engine,
        "layout": {
            "tp": endpoint.layout.tp,
            "pp": endpoint.layout.pp,
            "ep": endpoint.layout.ep,
            "dp": endpoint.layout.dp,
        },
        "labels": dict(endpoint.labels),
        "max_concurrency": endpoint.max_concurrency,
        "available": load.available,
        "state": state_of(live),
        "cause": health.cause,
        "slow": None if live.speed.slowness is None else msgspec.to_builtins(live.speed.slowness),
        "back_in_s": max(0.0, round(health.until - now, 3)) if not load.available else None,
        "in_flight": load.in_flight - load.others.in_flight,
        "in_flight_elsewhere": load.others.in_flight,
        "held_tokens": round(load.held_tokens),
        "prefill_tokens": load.prefill_tokens,
        "decode_tokens": load.decode_tokens,
        "expected_tokens": load.expected_tokens,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "scrape_age_s": None if load.scraped_at is None else round(now - load.scraped_at, 3),
        "connections": len(live.upstream.connections),
    }


def _splits(target: AdminTarget) -> list[dict[str, object]]:
    """Who may be paired with whom, by model and group of endpoints whose KV fits."""
    routes = {route.name: route for route in target.gateway.snapshot.routes.values()}
    return [
        {
            "model": name,
            "dialect": route.split.dialect.name,
            "compat": group.compat,
            "prefill": [each.endpoint.name for each in group.prefills],
            "decode": [each.endpoint.name for each in group.decodes],
        }
        for name, route in sorted(routes.items())
        if route.split is not None
        for group in route.split.pools.groups
    ]


def _pairs(target: AdminTarget) -> list[dict[str, object]]:
    """How handoffs went, for every pair that had one."""
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
