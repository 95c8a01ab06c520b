"""Tests that a stopping admin server first answers the requests that it has already received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web
from aiohttp.test_utils import unused_port

from gateway.admin.connection_shutdown import announce_close, end_connections

FOREVER = 300.0
"""Seconds after which a test that is still waiting fails."""


class Connected(NamedTuple):
    server: web.Server
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@asynccontextmanager
async def connected() -> AsyncIterator[Connected]:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="page\n")

    application, port = web.Application(), unused_port()
    application.router.add_get("/", page)
    announce_close(application, lambda: True)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert runner.server is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not runner.server.connections:
        await asyncio.sleep(0)
    await site.stop()
    yield Connected(runner.server, reader, writer)
    writer.close()
    await runner.cleanup()


async def test_a_connection_without_a_request_yet_is_answered_and_then_closed() -> None:
    async with connected() as (server, reader, writer):
        ending = asyncio.create_task(end_connections(server, FOREVER, FOREVER))
        await asyncio.sleep(0)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        response = await asyncio.wait_for(reader.read(), FOREVER)
        assert response.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in response.lower()
        assert response.endswith(b"page\n")
        await asyncio.wait_for(ending, FOREVER)


async def test_a_connection_that_sends_nothing_is_closed_when_the_patience_ends() -> None:
    async with connected() as (server, reader, _):
        # aiohttp waits for an idle connection as long as for one with a running response.
        await end_connections(server, 0.0, 0.01)
        assert await asyncio.wait_for(reader.read(), FOREVER) == b""
        assert not server.connections
