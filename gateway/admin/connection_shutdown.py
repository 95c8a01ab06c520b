"""Ends the connections of an admin server whose process is being replaced by a successor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from aiohttp import web

POLL_S = 0.02


def announce_close(application: web.Application, is_draining: Callable[[], bool]) -> None:
    """Make each response of the application close its connection while `is_draining` is true."""

    async def close_after(_: web.Request, response: web.StreamResponse) -> None:
        if is_draining():
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has chosen the header before

    application.on_response_prepare.append(close_after)


async def end_connections(server: web.Server, patience_s: float, response_s: float) -> None:
    """Close all connections of a server that no longer accepts new ones, after answering their
    requests.

    An idle connection may have sent a request that is still on its way, so each connection may send
    one request for `patience_s` seconds. Responses that have not ended `response_s` seconds later,
    such as live views, are cut off.
    """
    ends = monotonic() + patience_s
    while server.connections and monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    await server.shutdown(response_s)
