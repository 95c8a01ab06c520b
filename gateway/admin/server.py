"""The admin server of one gateway process: its table of pages, and /healthz and /readyz.

It has its own listener and never shares the API's port. security.py authorizes requests. Each group
of pages has a module of its own, such as endpoints_page.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.admin import config_pages, live_pages
from gateway.admin.auto_pages import add_auto
from gateway.admin.connection_shutdown import announce_close
from gateway.admin.drift_pages import add_drift, add_records
from gateway.admin.endpoints_page import add_endpoints
from gateway.admin.explain_page import add_explain
from gateway.admin.metrics_pages import add_metrics
from gateway.admin.readiness import not_ready_reason
from gateway.admin.recent_requests_page import RecentQuery, add_requests, recent_rows
from gateway.admin.security import access_middleware
from gateway.admin.trial_pages import add_trials
from gateway.config.yaml_source import MAX_FILE_BYTES

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface


def admin_application(target: GatewayInterface) -> web.Application:
    """Return the admin server's aiohttp application.

    Its pages can change the configuration (also by pinning a pool's policy), and drain endpoints.
    """
    server = web.Application(
        middlewares=[
            access_middleware(lambda: target.gateway.snapshot.config),
            _account_before(target),
        ],
        client_max_size=MAX_FILE_BYTES + 1,
    )
    announce_close(server, lambda: target.is_draining)
    _add_health(target, server.router)
    add_metrics(target, server.router)
    add_endpoints(target, server.router)
    add_explain(target, server.router)
    _add_recent_requests(target, server.router)
    add_trials(target, server.router)
    config_pages.add(target, server.router)
    add_auto(server.router, lambda: target.auto)
    if target.drift is None:  # this is a worker process; its supervisor reads the records
        add_records(server.router, target.gateway.accounts.shapes)
    else:
        add_drift(server.router, lambda: target.drift)
    live_pages.add_process_view(target, server)
    return server


def _account_before(target: GatewayInterface) -> Middleware:
    # Return a middleware that has all ended requests accounted, so that pages show them.
    @web.middleware
    async def account(request: web.Request, handler: Handler) -> web.StreamResponse:
        target.gateway.accounts.account_ended()
        return await handler(request)

    return account


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


def _add_recent_requests(target: GatewayInterface, routes: web.UrlDispatcher) -> None:
    async def requests(query: RecentQuery) -> dict[str, object]:
        return recent_rows(target.gateway.accounts.recent_exchanges, query)

    add_requests(routes, requests)
