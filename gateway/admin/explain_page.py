"""The admin page GET /explain/{id}: why a recent request was routed to its endpoint.

pick_explanation.py computes the explanation. This page adds who chose the pool's policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from gateway.fleet.model_alias_lookup import find

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface


def add_explain(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    """Add the page GET /explain/{id} about one request's routing to the admin server's `routes`."""

    async def explain(request: web.Request) -> web.Response:
        request_id, explained = request.match_info["id"], target.gateway.accounts.recent_exchanges
        page = (
            explained.newest_as_json()
            if request_id == "last"
            else explained.find_as_json(request_id)
        )
        if page is None:
            return web.json_response(
                {"message": "no request with this id is among the most recently finished ones"},
                status=404,
            )
        return web.json_response(page | {"auto": _policy_choice(target, str(page["model"]))})

    routes.add_get("/explain/{id}", explain)


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
