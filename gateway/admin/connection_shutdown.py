"""Closes the connections of an admin server whose process is being replaced by another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from aiohttp import web

POLL_S = 0.02


def announce_close(application: web.Application, is_draining: Callable[[], bool]) -> None:
    """Make every response of the application close its connection while `is_draining` is true."""

    async def close_after(_: web.Request, response: web.StreamResponse) -> None:
        if is_draining():
            response.force_close()
            response.headers["Connection"] = "close"  # replaces the header that aiohttp has chosen

    application.on_response_prepare.append(close_after)


async def end_connections(server: web.Server, patience_s: float, response_s: float) -> None:
    """Close all connections of a server that accepts no new ones, after answering their requests.

    patience_s  seconds in which each connection may send one more request: it may be on its way
    response_s  seconds after that, at whose end unfinished responses such as live views are cut off
    """
    ends = monotonic() + patience_s
    while server.connections and monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    await server.shutdown(response_s)
