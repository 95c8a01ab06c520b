"""A message bus between the processes of one machine, over a unix socket in a private folder.

One process runs the hub, which forwards frames. On the wire, a frame follows its length (4 bytes,
little-endian) and its recipient (8 bytes). A connection begins with the client's id (8 bytes). The
hub answers with an empty frame. From then on, the client receives all frames.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from struct import Struct
from time import monotonic

from gateway.peers.bus_interface import (
    BACKLOG_CAP_BYTES,
    BROADCAST,
    FRAME_CAP_BYTES,
    ID_BYTES,
    Backlog,
    BusState,
    DropCounter,
    FrameHandler,
)

log = logging.getLogger("penstock")

RETRY_S = 0.1
_HEAD = Struct(f"<I{ID_BYTES}s")


class LocalHub:
    """Forwards each frame to its recipient, or to all other clients of the local bus.

    A client that reads too slowly loses frames.
    """

    def __init__(self, path: Path, count_drop: DropCounter) -> None:
        self._path = path
        self._count_drop = count_drop
        self._server: asyncio.Server | None = None
        self._clients: dict[bytes, asyncio.StreamWriter] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._clients.values()):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = b""
        try:
            client = await reader.readexactly(ID_BYTES)
            self._clients[client] = writer
            writer.write(_HEAD.pack(0, client))
            while True:
                head = await reader.readexactly(_HEAD.size)
                length, to = _HEAD.unpack(head)
                if length > FRAME_CAP_BYTES:
                    self._count_drop("too_long")
                    break
                self._forward(client, to, head + await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if self._clients.get(client) is writer:
                del self._clients[client]
            writer.transport.abort()

    def _forward(self, sender: bytes, to: bytes, data: bytes) -> None:
        for client, writer in self._clients.items():
            if client == sender or to not in (BROADCAST, client):
                continue
            if writer.transport.get_write_buffer_size() <= BACKLOG_CAP_BYTES:
                writer.write(data)
            else:
                self._count_drop("slow")


class LocalBus:
    """The connection of one process to the hub of the local message bus; implements Bus."""

    def __init__(self, path: Path, count_drop: DropCounter) -> None:
        self._path = path
        self._backlog = Backlog(count_drop)
        self._connects = 0
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lost_at: float | None = monotonic()

    async def start(self, own_id: bytes, deliver: FrameHandler) -> None:
        self._task = asyncio.create_task(self._run(own_id, deliver), name="local bus")

    async def stop(self) -> None:
        if self._writer is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._writer.drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def publish(self, frame: bytes, to: bytes = BROADCAST) -> None:
        self._backlog.add(to, frame)
        self._flush()

    def state(self, now: float) -> BusState:
        lost_at, waiting = self._lost_at, self._backlog.bytes
        if self._writer is not None:
            waiting += self._writer.transport.get_write_buffer_size()
        staleness_s = 0.0 if lost_at is None else max(0.0, now - lost_at)
        return BusState(lost_at is None, staleness_s, waiting, max(0, self._connects - 1))

    def _flush(self) -> None:
        # Write waiting frames up to a limit.
        #
        # The others stay in the backlog, which drops the oldest ones.
        writer = self._writer
        while writer is not None and len(self._backlog):
            if writer.transport.get_write_buffer_size() > BACKLOG_CAP_BYTES:
                return
            to, frame = self._backlog.pop_oldest()
            writer.write(_HEAD.pack(len(frame), to) + frame)

    async def _run(self, own_id: bytes, deliver: FrameHandler) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                writer.write(own_id)
                await reader.readexactly(_HEAD.size)
                self._writer, self._lost_at = writer, None
                self._connects += 1
                self._flush()
                await self._read(reader, deliver)
            except (OSError, asyncio.IncompleteReadError):
                log.warning(
                    "shared state: the connection to this machine's message hub is "
                    "lost; this worker continues with its own state"
                )
            finally:
                self._writer, self._lost_at = None, monotonic()
                writer.transport.abort()
            await asyncio.sleep(RETRY_S)

    async def _read(self, reader: asyncio.StreamReader, deliver: FrameHandler) -> None:
        while True:
            length, _ = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if length > FRAME_CAP_BYTES:
                return
            deliver(await reader.readexactly(length), 0.0)
            self._flush()
