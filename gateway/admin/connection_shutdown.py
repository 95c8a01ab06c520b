"""Closes the connections of an admin server whose process is being replaced by another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from aiohttp import web

POLL_S = 0.02


def announce_close(application: web.Application, is_draining: Callable[[], bool]) -> None:
    """Make an application close each connection after a response while `is_draining` returns true.

    The responses announce this in the header `Connection: close`, so that clients send no further
    request there.
    """

    async def close_after(_: web.Request, response: web.StreamResponse) -> None:
        if is_draining():
            response.force_close()
            response.headers["Connection"] = "close"  # replaces the header that aiohttp has chosen

    application.on_response_prepare.append(close_after)


async def end_connections(server: web.Server, patience_s: float, response_s: float) -> None:
    """Close the connections of a server that is being shut down, after answering their requests.

    The server accepts no new connections any more.

    patience_s  seconds to wait for the connections, each of which closes after its next response
    response_s  seconds after that, before unfinished responses such as live views are cut off
    """
    ends = monotonic() + patience_s
    while server.connections and monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    await server.shutdown(response_s)
