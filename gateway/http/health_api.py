"""The pages /, /health, /ping and /version of the API listener, which need no API key.

The pages show that this process answers HTTP requests. The page /readyz of the admin server shows
whether the process can serve models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from gateway.util.version import program_version

# Some balancers probe "/" by default, and Claude Code asks for it before its first request.
HEALTH_PATHS = ("/", "/health", "/ping")


def add_health(routes: web.UrlDispatcher, headers: Callable[[], Mapping[str, str]]) -> None:
    """Add the routes for health and version.

    `headers` returns the header fields of every response of the listener.
    """

    async def show_alive(_: web.Request) -> web.StreamResponse:
        return web.Response(headers=headers())

    async def show_version(_: web.Request) -> web.StreamResponse:
        return web.json_response({"version": program_version()}, headers=headers())

    for path in HEALTH_PATHS:
        routes.add_get(path, show_alive)
    routes.add_post("/ping", show_alive)
    routes.add_get("/version", show_version)
