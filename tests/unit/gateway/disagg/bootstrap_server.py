"""A scripted server that tells clients the address and identity of a prefill engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BootstrapRequests(list[str]):
    hung_up = 0


@asynccontextmanager
async def bootstrap_server(
    pages: list[bytes], gate: asyncio.Event | None = None
) -> AsyncIterator[tuple[str, BootstrapRequests]]:
    # Run a bootstrap server; yield its address and the requests that it receives.
    #
    # pages    response bodies, one per request; the last one repeats, an empty one sends nothing
    # gate     if set, responses wait until it is set
    asks, answering = BootstrapRequests(), set[asyncio.Task[None]]()

    async def answer(writer: asyncio.StreamWriter) -> None:
        if gate is not None:
            await gate.wait()
        page = pages.pop(0) if len(pages) > 1 else pages[0]
        if page:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asks.append(head.split(b"\r\n", 1)[0].decode())
                answering.add(asyncio.ensure_future(answer(writer)))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            asks.hung_up += 1
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asks
    finally:
        server.close()
        for task in answering:
            task.cancel()


def page(engine: str) -> bytes:
    return json.dumps({"0": {"engine_id": engine, "worker_addr": {}}}).encode()
