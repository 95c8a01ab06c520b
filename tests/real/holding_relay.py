"""A TCP relay in front of an engine that detects requests, and can hold them back.

A test uses it to choose the moment at which a client disconnects or an engine dies. If a connection
is closed while its request is held back, the engine receives the request first, and then the end of
the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MARK = b"POST /v1/"
PIECE = 1 << 16


class Tap:
    def __init__(self, engine_port: int) -> None:
        self.engine_port = engine_port
        self.port = 0
        self.asked = asyncio.Event()  # a completion request has come here since `watch`
        self.answered = asyncio.Event()  # and the first bytes of an answer to one have passed
        self._go = asyncio.Event()
        self._go.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def watch(self, *, hold: bool = False) -> None:
        # Reset the recorded events; with `hold`, completion requests are held back from now on.
        self.asked.clear()
        self.answered.clear()
        if hold:
            self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.engine_port)
        except OSError:
            writer.transport.abort()
            return
        posted = asyncio.Event()
        requests = self._requests(reader, far_writer, posted)
        answers = self._answers(far_reader, writer, posted)
        await asyncio.gather(requests, answers)

    async def _requests(
        self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, posted: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await _read(reader):
                if MARK in data:
                    posted.set()
                    self.asked.set()
                    data += await self._held_back(reader)
                engine.write(data)
                await engine.drain()
        engine.close()

    async def _held_back(self, reader: asyncio.StreamReader) -> bytes:
        # Read further bytes until the test releases the request or the gateway disconnects.
        more = b""
        while not self._go.is_set():
            with suppress(TimeoutError):
                data = await asyncio.wait_for(_read(reader), 0.02)
                if not data:
                    break
                more += data
        return more

    async def _answers(
        self, reader: asyncio.StreamReader, gateway: asyncio.StreamWriter, posted: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await _read(reader):
                if posted.is_set():
                    self.answered.set()
                gateway.write(data)
                await gateway.drain()
        gateway.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    # Return the next bytes, or none at the end of the connection, even after a reset.
    try:
        return await reader.read(PIECE)
    except ConnectionError:
        return b""


@asynccontextmanager
async def tap(engine_port: int) -> AsyncIterator[Tap]:
    made = Tap(engine_port)
    server = await asyncio.start_server(made.relay, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
