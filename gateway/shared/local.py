"""A bus between processes of one machine: a hub in one of them, a unix socket in a folder that nobody else may enter.

On the wire: length (4 bytes, little-endian), whom it is for (8), the frame. A connection begins with who it is (8),
which the hub answers with an empty frame: from then on nothing is missed.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from struct import Struct
from time import monotonic

from gateway.shared.bus import BACKLOG_CAP_BYTES, EVERYBODY, FRAME_CAP_BYTES, ID_BYTES, Backlog, BusState, Deliver, Drop

log = logging.getLogger("penstock")

RETRY_S = 0.1
_HEAD = Struct(f"<I{ID_BYTES}s")


class Hub:
    """Passes on what each says to all others, or to whom it is for. Who does not keep up loses what is too much."""

    def __init__(self, path: Path, drop: Drop) -> None:
        self._path = path
        self._drop = drop
        self._server: asyncio.Server | None = None
        self._lines: dict[bytes, asyncio.StreamWriter] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in tuple(self._lines.values()):
            line.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = b""
        try:
            who = await reader.readexactly(ID_BYTES)
            self._lines[who] = writer
            writer.write(_HEAD.pack(0, who))
            while True:
                head = await reader.readexactly(_HEAD.size)
                length, to = _HEAD.unpack(head)
                if length > FRAME_CAP_BYTES:
                    self._drop("too_long")
                    break
                self._pass_on(who, to, head + await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if self._lines.get(who) is writer:
                del self._lines[who]
            writer.transport.abort()

    def _pass_on(self, who: bytes, to: bytes, told: bytes) -> None:
        for name, line in self._lines.items():
            if name == who or to not in (EVERYBODY, name):
                continue
            if line.transport.get_write_buffer_size() <= BACKLOG_CAP_BYTES:
                line.write(told)
            else:
                self._drop("slow")


class LocalBus:
    """One process' line to the hub."""

    def __init__(self, path: Path, drop: Drop) -> None:
        self._path = path
        self._backlog = Backlog(drop)
        self._times = 0
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lost_at: float | None = monotonic()

    async def start(self, me: bytes, deliver: Deliver) -> None:
        self._task = asyncio.create_task(self._keep(me, deliver), name="hear the machine's others")

    async def stop(self) -> None:
        if self._writer is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._writer.drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def publish(self, frame: bytes, to: bytes = EVERYBODY) -> None:
        self._backlog.add(to, frame)
        self._flush()

    def state(self, now: float) -> BusState:
        lost_at, waiting = self._lost_at, self._backlog.bytes
        if self._writer is not None:
            waiting += self._writer.transport.get_write_buffer_size()
        stale_s = 0.0 if lost_at is None else max(0.0, now - lost_at)
        return BusState(lost_at is None, stale_s, waiting, max(0, self._times - 1))

    def _flush(self) -> None:
        """As much as the socket may be asked to hold; the rest waits where the oldest can be dropped."""
        writer = self._writer
        while writer is not None and len(self._backlog):
            if writer.transport.get_write_buffer_size() > BACKLOG_CAP_BYTES:
                return
            to, frame = self._backlog.take()
            writer.write(_HEAD.pack(len(frame), to) + frame)

    async def _keep(self, me: bytes, deliver: Deliver) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                writer.write(me)
                await reader.readexactly(_HEAD.size)
                self._writer, self._lost_at = writer, None
                self._times += 1
                self._flush()
                await self._read(reader, deliver)
            except (OSError, asyncio.IncompleteReadError):
                log.warning("shared view: the hub of this machine is gone; going on alone")
            finally:
                self._writer, self._lost_at = None, monotonic()
                writer.transport.abort()
            await asyncio.sleep(RETRY_S)

    async def _read(self, reader: asyncio.StreamReader, deliver: Deliver) -> None:
        while True:
            length, _ = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if length > FRAME_CAP_BYTES:
                return
            deliver(await reader.readexactly(length), 0.0)
            self._flush()
