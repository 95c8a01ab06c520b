"""The live view on the admin server: the page, the value, its stream, and draining an endpoint by hand.

Lives here: HTTP. Not here: who may ask (gateway/admin/auth.py), what is told (gateway/admin/live_view.py) and when (gateway/admin/live_stream.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.admin.fleet_status import Standing, stand
from gateway.admin.live_stream import Hub, Look
from gateway.admin.metric_samples import Mark, take

if TYPE_CHECKING:
    from gateway.live.target import AdminTarget

SLOW_S = 5.0
"""A watcher that takes nothing for so long is let go; its browser comes back by itself."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)
STREAM = MappingProxyType(
    {
        "Content-Type": "text/event-stream; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",
    }
)
FILES: Mapping[str, str] = MappingProxyType(
    {
        "index.html": "text/html",
        "live.css": "text/css",
        **{f"{name}.js": "text/javascript" for name in ("live", "charts", "dom", "fleet", "flow", "requests")},
        "uplot.js": "text/javascript",
        "uplot.css": "text/css",
        "uplot.LICENSE": "text/plain",
        "icon.svg": "image/svg+xml",
    }
)
"""All there is of the page; no other name is looked for."""


Note = tuple[Mark, Standing]
"""What a supervisor makes its view of, one from each worker."""


def add(target: AdminTarget, server: web.Application) -> None:
    """GET /, /web/{name}, /live, /live/stream, /live/note; POST /endpoints/{name}/drain and /undrain."""

    async def look(before: Mark | None) -> Note:
        now = monotonic()
        return take(target, now, before), stand(target, now)

    async def note(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.msgpack.encode(await look(None)), content_type="application/msgpack")

    server.router.add_get("/live/note", note)
    server.router.add_post("/endpoints/{name}/{what:drain|undrain}", _drainer(target))
    add_view(server, look, lambda: target.draining)


def add_view(server: web.Application, look: Look, draining: Callable[[], bool]) -> None:
    """GET /, /web/{name}, /live, /live/stream, of whoever `look` looks at."""
    hub = Hub(look)

    async def noting(_: web.Application) -> AsyncIterator[None]:
        hub.start()
        yield
        hub.stop()

    async def once(_: web.Request) -> web.Response:
        try:
            return web.Response(body=await hub.frame(), content_type="application/json")
        except LookupError as error:
            return web.Response(status=503, text=f"{error}\n")

    async def stream(request: web.Request) -> web.StreamResponse:
        if draining():
            return web.Response(status=503, text="draining\n")
        if not hub.enter():
            return web.Response(status=503, text="too many watch already\n", headers={"Retry-After": "5"})
        try:
            return await _stream(request, hub, draining)
        finally:
            hub.leave()

    server.cleanup_ctx.append(noting)
    server.router.add_get("/live", once)
    server.router.add_get("/live/stream", stream, allow_head=False)
    _add_files(server)


async def _stream(request: web.Request, hub: Hub, draining: Callable[[], bool]) -> web.StreamResponse:
    answer = web.StreamResponse(headers=STREAM)
    await answer.prepare(request)
    try:
        frame = await hub.frame()
        while not draining():
            async with asyncio.timeout(SLOW_S):
                await answer.write(b"data: " + frame + b"\n\n")
            frame = await hub.following()
    except (TimeoutError, ConnectionResetError, LookupError):
        if request.transport is not None:
            request.transport.abort()
    return answer


def _drainer(target: AdminTarget) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def drain(request: web.Request) -> web.Response:
        name, wanted = request.match_info["name"], request.match_info["what"] == "drain"
        staying = (
            live for live in target.gateway.endpoints.all() if not live.leaving
        )  # one who leaves may share a name
        found = next((live for live in staying if live.endpoint.name == name), None)
        if found is None:
            return web.json_response(
                {"result": "nothing", "message": f"no endpoint is called {name!r:.80}"}, status=404
            )
        left = target.gateway.endpoints.drain(found, wanted)
        return web.json_response({"result": "applied", "endpoint": name, "drained": wanted, "in_flight": left})

    return drain


def _add_files(server: web.Application) -> None:
    folder = files("gateway.admin") / "web"
    kept = {name: (folder / name).read_bytes() for name in FILES}

    def page(name: str) -> web.Response:
        return web.Response(body=kept[name], content_type=FILES[name], charset="utf-8", headers=HEADERS)

    async def index(_: web.Request) -> web.Response:
        return page("index.html")

    async def part(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return page(name) if name in FILES else web.Response(status=404, text="no such file\n")

    server.router.add_get("/", index)
    server.router.add_get("/web/{name}", part)
