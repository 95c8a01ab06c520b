"""A TCP relay in front of an engine that reports requests and answers, and can delay requests.

The effect of a cancelled client depends on the time of its disconnect; a tap lets a test choose it.
If a connection is closed while its request is delayed, the relay forwards first the request and
then the close.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MARK = b"POST /v1/"
PIECE = 1 << 16


class Tap:
    """A relay with one listening port for one engine.

    asked     a completion request has arrived since `watch`
    answered  the first bytes of an answer to one have passed
    """

    def __init__(self, engine_port: int) -> None:
        self.engine_port = engine_port
        self.port = 0
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def watch(self, *, hold: bool = False) -> None:
        """Reset both events; with `hold`, delay completion requests until `go_on`."""
        self.asked.clear()
        self.answered.clear()
        if hold:
            self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection of the gateway; without an engine, abort it."""
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
                    data += await self._delay_request(reader)
                engine.write(data)
                await engine.drain()
        engine.close()

    async def _delay_request(self, reader: asyncio.StreamReader) -> bytes:
        """Return the bytes that arrive until `go_on`, or until the gateway disconnects."""
        received = b""
        while not self._go.is_set():
            with suppress(TimeoutError):
                data = await asyncio.wait_for(_read(reader), 0.02)
                if not data:
                    break
                received += data
        return received

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
    """Return the next bytes; empty at the end, also after a reset."""
    try:
        return await reader.read(PIECE)
    except ConnectionError:
        return b""


@asynccontextmanager
async def tap(engine_port: int) -> AsyncIterator[Tap]:
    """Run a tap while the block runs."""
    relay = Tap(engine_port)
    server = await asyncio.start_server(relay.relay, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
