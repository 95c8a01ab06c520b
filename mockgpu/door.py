"""The door for `penstock chaos`: faults of a fleet's groups, set while it runs, by this machine and by nobody else.

It is there only if the fleet was started with a port for it, listens on 127.0.0.1 whatever the groups listen on, and
stays open whatever is wrong with a group: a group that refuses connections could not be told to stop it. A page in a
browser is turned away. Not here: what a fault is (faults.py) and does (faultbox.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from mockgpu.ask import ApiError, decoded
from mockgpu.faults import FaultError
from mockgpu.server import FaultOrder

if TYPE_CHECKING:
    from mockgpu.fleet import Member

HOST = "127.0.0.1"
MOST_BYTES = 4096
FROM_A_BROWSER = ("Origin", "Sec-Fetch-Site", "Referer")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def open_door(members: Sequence[Member], port: int) -> AsyncIterator[int]:
    """Listen until the block is left; the port, a free one for 0. OSError when it is taken."""
    runner = web.AppRunner(application(members), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def application(members: Sequence[Member]) -> web.Application:
    """GET /faults and POST /faults/{port of a group}."""

    async def show(_: web.Request) -> web.Response:
        return _json(
            {
                str(each.listener.port): {"spec": each.faults.spec, "jobs": each.group.in_flight}
                for each in members
            }
        )

    async def put(request: web.Request) -> web.Response:
        port = request.match_info["port"]
        member = next((each for each in members if str(each.listener.port) == port), None)
        if member is None:
            return _json({"error": f"no group of this fleet has the port {port[:8]}"}, 404)
        jobs, before = member.group.in_flight, member.faults.spec
        try:
            spec = decoded(await request.read(), FaultOrder).spec
            member.faults.set(spec)
        except (FaultError, ApiError) as error:
            return _json({"error": str(error)}, 400)
        return _json({"spec": spec, "before": before, "jobs": jobs})

    server = web.Application(client_max_size=MOST_BYTES, middlewares=[_no_pages])
    server.router.add_get("/faults", show)
    server.router.add_post("/faults/{port}", put)
    return server


@web.middleware
async def _no_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page may reach 127.0.0.1 too: what a browser sends is refused, and any name but an address's."""
    host = request.headers.get("Host", HOST).rpartition(":")[0] or request.headers.get("Host", HOST)
    if host not in (HOST, "localhost") or any(name in request.headers for name in FROM_A_BROWSER):
        return _json({"error": "pages may not break anything here"}, 403)
    return await handler(request)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
