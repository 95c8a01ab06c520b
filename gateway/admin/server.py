"""The admin server of one gateway process: health, readiness, metrics, and the state of endpoints.

It has its own listener and never shares the API's port. security.py authorizes requests. The pages
of the configuration are in config_pages.py, and those of the live view in live_pages.py.
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.admin import config_pages, live_pages
from gateway.admin.auto_pages import add_auto
from gateway.admin.connection_shutdown import announce_close
from gateway.admin.drift_pages import add_drift, add_records
from gateway.admin.fleet_status import endpoint_state, in_turns
from gateway.admin.readiness import not_ready_reason
from gateway.admin.recent_requests import RecentQuery, add_requests, recent_rows
from gateway.admin.security import access_middleware
from gateway.config.yaml_source import MAX_FILE_BYTES
from gateway.fleet.kv_events.exact_prefixes import ExactPrefixes
from gateway.fleet.model_lookup import find
from gateway.metrics.exposition import (
    content_type,
    page_end,
    render_family_in_parts,
    wants_openmetrics,
)

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface
    from gateway.fleet.endpoint_registry import LiveEndpoint
    from gateway.route import Gateway


def admin_application(target: GatewayInterface) -> web.Application:
    """Return the admin server's aiohttp application.

    It changes the gateway only through the pages of the configuration and those that drain an
    endpoint.
    """
    server = web.Application(
        middlewares=[access_middleware(lambda: target.gateway.snapshot.config)],
        client_max_size=MAX_FILE_BYTES + 1,
    )
    announce_close(server, lambda: target.is_draining)
    _add_health(target, server.router)
    _add_metrics(target, server.router)
    _add_state(target, server.router)
    _add_trials(target, server.router)
    config_pages.add(target, server.router)
    add_auto(server.router, lambda: target.auto)
    if target.drift is None:  # in a worker process, whose supervisor takes the records
        add_records(server.router, target.gateway.accounts.shapes)
    else:
        add_drift(server.router, lambda: target.drift)
    live_pages.add_process_view(target, server)
    return server


def _add_health(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready_reason(target.gateway, is_draining=target.is_draining)
        return (
            web.Response(text="ready\n")
            if reason is None
            else web.Response(status=503, text=f"{reason}\n")
        )

    routes.add_get("/healthz", healthz)
    routes.add_get("/readyz", readyz)


def _add_metrics(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    async def metrics(request: web.Request) -> web.Response:
        exemplars = wants_openmetrics(request.headers.get("Accept", ""))
        page = []
        for family in target.metrics.collect(_unix_offset() if exemplars else None):
            await asyncio.sleep(0)
            for part in render_family_in_parts(family, exemplars=exemplars):
                page.append(part)
                # A page takes tens of milliseconds at 64 endpoints; let streams continue meanwhile.
                await asyncio.sleep(0)
        page.append(page_end(exemplars=exemplars))
        return web.Response(
            body=b"".join(page), headers={"Content-Type": content_type(exemplars=exemplars)}
        )

    async def readings(request: web.Request) -> web.Response:
        families = []
        for family in target.metrics.collect(
            _unix_offset() if "exemplars" in request.query else None
        ):
            families.append(family)
            await asyncio.sleep(0)
        return web.Response(
            body=msgspec.msgpack.encode(families), content_type="application/msgpack"
        )

    routes.add_get("/metrics", metrics)
    routes.add_get("/metrics/readings", readings)


def _unix_offset() -> float:
    return time() - monotonic()


def _add_state(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    async def endpoints(_: web.Request) -> web.Response:
        rows = await endpoint_rows(target.gateway)
        content = {"endpoints": rows, "splits": _splits(target), "pairs": _pairs(target)}
        return web.Response(body=msgspec.json.encode(content), content_type="application/json")

    async def explain(request: web.Request) -> web.Response:
        request_id, explained = request.match_info["id"], target.gateway.accounts.recent_exchanges
        page = (
            explained.newest_as_json()
            if request_id == "last"
            else explained.find_as_json(request_id)
        )
        if page is None:
            return web.json_response(
                {"message": "no such request among the most recently finished ones"}, status=404
            )
        return web.json_response(page | {"auto": _policy_choice(target, str(page["model"]))})

    async def requests(query: RecentQuery) -> dict[str, object]:
        return recent_rows(target.gateway.accounts.recent_exchanges, query)

    routes.add_get("/endpoints", endpoints)
    routes.add_get("/explain/{id}", explain)
    add_requests(routes, requests)


def _add_trials(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    async def shadow(_: web.Request) -> web.Response:
        trials = target.gateway.snapshot.trials.values()
        return web.json_response(
            {"shadows": [trial.shadows.as_json() for trial in trials if trial.shadows is not None]}
        )

    async def canary(_: web.Request) -> web.Response:
        trials = target.gateway.snapshot.trials.values()
        return web.json_response(
            {"canaries": [trial.arms.as_json() for trial in trials if trial.arms is not None]}
        )

    async def mirror(_: web.Request) -> web.Response:
        mirrors = target.gateway.mirrors
        return web.json_response({"mirrors": []} if mirrors is None else mirrors.as_json())

    routes.add_get("/shadow", shadow)
    routes.add_get("/canary", canary)
    routes.add_get("/mirror", mirror)


def _policy_choice(target: GatewayInterface, model: str) -> dict[str, object] | None:
    route = find(target.gateway.snapshot.routes, model)
    if route is None or target.gateway.snapshot.config.pools[route.pool].auto is None:
        return None
    path = f"pools.{route.pool}.policy"
    for version in reversed(target.reloader.history.all()):
        if any(change.path.startswith(path) for change in version.changes):
            chosen = {"version": version.number, "reason": version.reason}
            return chosen if version.trigger == "auto" else None
    return None


async def endpoint_rows(gateway: Gateway) -> list[dict[str, object]]:
    """Return all endpoints with their state, as on the page /endpoints."""
    now, exact = monotonic(), gateway.endpoints.prefixes.exact
    return await in_turns(
        gateway.endpoints.all(),
        lambda live: _endpoint_row(live, now) | _event_row(exact, live, now),
    )


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
    # Return what an endpoint's KV events say; nothing for an endpoint without events.
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
