"""The admin pages about trials: GET /shadow, /canary (routing policies) and /mirror (engines)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface


def add_trials(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    """Add the admin pages with the results of trials: /shadow, /canary and /mirror.

    Shadow and canary are routing policies on trial; a mirror compares candidate engines' answers.
    """

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
