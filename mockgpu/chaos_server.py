"""The HTTP server with which `penstock chaos` sets faults of running mock engines, such as stalls.

It starts only if the mock engines were given a port for it. It listens only on 127.0.0.1, and
refuses requests of web pages. No fault affects it, so that an engine that refuses connections can
be healed. The syntax of faults is in mockgpu/fault_grammar.py, their effects are in
mockgpu/group_faults.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from mockgpu.fault_grammar import FaultError
from mockgpu.http.control_pages import FaultRequest
from mockgpu.request_parser import ApiError, decode_body

if TYPE_CHECKING:
    from mockgpu.fleet import FleetGroup

HOST = "127.0.0.1"
MOST_BYTES = 4096
BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site", "Referer")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def run_chaos_server(members: Sequence[FleetGroup], port: int) -> AsyncIterator[int]:
    """Run the server that sets mock engines' faults during an `async with` block; yield its port.

    Raises OSError if the port is in use.
    """
    runner = web.AppRunner(application(members), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def application(members: Sequence[FleetGroup]) -> web.Application:
    """Return the web application that sets the faults of these mock engines.

    - GET /faults returns the faults of all engines.
    - POST /faults/{port} sets the faults of the engine that listens on this port.
    """

    async def show(_: web.Request) -> web.Response:
        return _json(
            {
                str(member.listener.port): {
                    "spec": member.faults.spec,
                    "jobs": member.group.in_flight,
                }
                for member in members
            }
        )

    async def put(request: web.Request) -> web.Response:
        port = request.match_info["port"]
        member = next((member for member in members if str(member.listener.port) == port), None)
        if member is None:
            return _json(
                {"error": f"no mock engine of this process listens on port {port[:8]}"}, 404
            )
        jobs, before = member.group.in_flight, member.faults.spec
        try:
            spec = decode_body(await request.read(), FaultRequest).spec
            member.faults.apply(spec)
        except (FaultError, ApiError) as error:
            return _json({"error": str(error)}, 400)
        return _json({"spec": spec, "before": before, "jobs": jobs})

    server = web.Application(client_max_size=MOST_BYTES, middlewares=[_no_pages])
    server.router.add_get("/faults", show)
    server.router.add_post("/faults/{port}", put)
    return server


@web.middleware
async def _no_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    # Refuse requests that come from web pages or have an unexpected Host header.
    #
    # A page in a local browser could otherwise reach 127.0.0.1.
    host = request.headers.get("Host", HOST).rpartition(":")[0] or request.headers.get("Host", HOST)
    if host not in (HOST, "localhost") or any(name in request.headers for name in BROWSER_HEADERS):
        return _json({"error": "web pages are not allowed to set faults"}, 403)
    return await handler(request)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
