"""The HTTP pages of the live view: web page, JSON, and event stream.

security.py authorizes requests. The content of the view is in live_view.py, and its schedule in
live_stream.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateway.admin.live_fleet_status import FleetStatus, fleet_status
from gateway.admin.live_metric_samples import MetricSample, sample_steps
from gateway.admin.live_stream import LiveStream, SampleFunction
from gateway.util.work_in_turns import run_in_turns

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface

WRITE_TIMEOUT_S = 5.0
"""Seconds after which a watcher of the live view that accepts no data is disconnected; its browser
reconnects."""

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": CONTENT_POLICY,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)
STREAM_HEADERS = MappingProxyType(
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
        **{
            f"{name}.js": "text/javascript"
            for name in ("live", "charts", "dom", "fleet", "flow", "requests")
        },
        "uplot.js": "text/javascript",
        "uplot.css": "text/css",
        "uplot.LICENSE": "text/plain",
        "icon.svg": "image/svg+xml",
    }
)
"""The names of all files of the live view's web page; other names are not served."""


WorkerSample = tuple[MetricSample, FleetStatus]
"""What a worker process sends to its supervisor: a sample of its metrics and its status."""


def add_process_view(target: GatewayInterface, server: web.Application) -> None:
    """Add the live view of this process: /, /web/{name}, /live, /live/stream and /live/note."""

    async def sample_now(before: MetricSample | None) -> WorkerSample:
        now = monotonic()
        sample = await run_in_turns(sample_steps(target, now, before))
        return sample, await fleet_status(target, now)

    async def serve_sample(_: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.msgpack.encode(await sample_now(None)), content_type="application/msgpack"
        )

    server.router.add_get("/live/note", serve_sample)
    add_view(server, sample_now, lambda: target.is_draining)


def add_view(
    server: web.Application, sample_now: SampleFunction, draining: Callable[[], bool]
) -> None:
    """Add the pages /, /web/{name}, /live and /live/stream of a live view.

    sample_now  function that returns a metric sample and the status that the view shows
    draining    function that returns whether this process is being shut down; new streams are then
                refused
    """
    hub = LiveStream(sample_now)

    async def run_hub(_: web.Application) -> AsyncIterator[None]:
        hub.start()
        yield
        hub.stop()

    async def serve_frame(_: web.Request) -> web.Response:
        try:
            return web.Response(body=await hub.current_frame(), content_type="application/json")
        except LookupError as error:
            return web.Response(status=503, text=f"{error}\n")

    async def stream(request: web.Request) -> web.StreamResponse:
        if draining():
            return web.Response(status=503, text="draining\n")
        if not hub.try_add_watcher():
            return web.Response(
                status=503,
                text="too many browsers already watch the live view\n",
                headers={"Retry-After": "5"},
            )
        try:
            return await _stream(request, hub, draining)
        finally:
            hub.remove_watcher()

    server.cleanup_ctx.append(run_hub)
    server.router.add_get("/live", serve_frame)
    server.router.add_get("/live/stream", stream, allow_head=False)
    _add_files(server)


async def _stream(
    request: web.Request, hub: LiveStream, draining: Callable[[], bool]
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    try:
        frame = await hub.current_frame()
        while not draining():
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write(b"data: " + frame + b"\n\n")
            frame = await hub.next_frame()
    except (TimeoutError, ConnectionResetError, LookupError):
        if request.transport is not None:
            request.transport.abort()
    return response


def _add_files(server: web.Application) -> None:
    folder = files("gateway.admin") / "web"
    contents = {name: (folder / name).read_bytes() for name in FILES}

    def page(name: str) -> web.Response:
        return web.Response(
            body=contents[name], content_type=FILES[name], charset="utf-8", headers=PAGE_HEADERS
        )

    async def index(_: web.Request) -> web.Response:
        return page("index.html")

    async def part(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return page(name) if name in FILES else web.Response(status=404, text="no such file\n")

    server.router.add_get("/", index)
    server.router.add_get("/web/{name}", part)
