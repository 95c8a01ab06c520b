"""A TCP relay that a test can cut: it closes and refuses connections, or keeps them silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE = 1 << 16


class Relay:
    def __init__(self, far_port: int) -> None:
        self.port = 0
        self._far_port = far_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._passing = asyncio.Event()
        self._passing.set()

    def cut(self, *, is_silent: bool) -> None:
        # Let no byte through, on open connections and new ones, until `mend`.
        if is_silent:
            self._passing.clear()
        else:
            self._is_cut = True
            self._close_all()

    def mend(self) -> None:
        # Close the connections that were silenced, because bytes sent on them are lost.
        was_silent = not self._passing.is_set()
        self._is_cut = False
        if was_silent:
            self._close_all()
        self._passing.set()

    def _close_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def relay(far_port: int) -> AsyncIterator[Relay]:
    made = Relay(far_port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.mend()
        made._close_all()
        while made._writers:
            await asyncio.sleep(0.01)
