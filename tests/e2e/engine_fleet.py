"""Engines on real sockets that answer, refuse connections, or accept and reset them, as the test says."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from time import monotonic
from typing import Any

import aiohttp

from gateway.app import App
from gateway.config import Config
from tests.patient import patient

MODEL = "demo"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": MODEL,
    "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
}
MODELS = {"object": "list", "data": [{"id": MODEL}]}


class Mode(Enum):
    """What an engine does with a connection."""

    ANSWERS = "answers"
    REFUSES = "refuses"
    RESETS = "resets"


class Engine:
    """One engine on a port of its own, which it keeps in every mode.

    posts      requests that it has read, by the gateway's request id
    delay_s    time from a request to its answer
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.posts: Counter[str] = Counter()
        self.delay_s = delay_s
        self.mode = Mode.REFUSES
        self._socket = _bound(0)
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def become(self, mode: Mode) -> None:
        """Change the mode; connections that are open are reset unless the engine answers."""
        if mode is not Mode.ANSWERS:
            for writer in tuple(self._writers):
                _reset(writer)
        if self._server is not None and mode is Mode.REFUSES:
            self._server.close()
            self._server = None
            self._socket = _bound(self.port)  # bound and not listening: connections are refused
        elif self._server is None and mode is not Mode.REFUSES:
            self._server = await asyncio.start_server(self._talk, sock=self._socket, backlog=512)
        self.mode = mode

    def close(self) -> None:
        for writer in tuple(self._writers):
            _reset(writer)
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode is Mode.RESETS:
            _reset(writer)
            return
        self._writers.add(writer)
        try:
            while True:
                await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            _say(writer, MODELS if b"/v1/models" in head else {})
            return
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        await reader.readexactly(int(lines[b"content-length"]))
        self.posts[lines[b"x-request-id"].decode()] += 1
        await asyncio.sleep(self.delay_s)
        _say(writer, ANSWER)


def _bound(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.setblocking(False)
    return made


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


def _say(writer: asyncio.StreamWriter, body: object) -> None:
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(raw) + raw)


class Fleet:
    """A gateway before engines, and clients of it."""

    def __init__(self, app: App, engines: Sequence[Engine], http: aiohttp.ClientSession) -> None:
        self.app = app
        self.engines = engines
        self.http = http
        self._asked = 0

    async def ask(self) -> int:
        """Send one request and return the status of its answer."""
        self._asked += 1
        body = {"model": MODEL, "prompt": f"{self._asked} " * 64, "max_tokens": 1}
        async with self.http.post(f"{self.app.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def ask_often(self, times: int) -> Counter[int]:
        """Send so many requests at the same time and count the statuses."""
        return Counter(await asyncio.gather(*(self.ask() for _ in range(times))))

    async def load(self, clients: int, until: asyncio.Event) -> Counter[int]:
        """Send requests from so many clients, one after another each, until the event."""
        statuses: Counter[int] = Counter()

        async def client() -> None:
            while not until.is_set():
                statuses[await self.ask()] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return statuses

    async def timed(self) -> tuple[int, float]:
        """Send one request; its status and the seconds that it took."""
        began = monotonic()
        return await self.ask(), monotonic() - began


@asynccontextmanager
async def fleet(modes: Sequence[Mode], *, policy: str, delay_s: float = 0.0, **sections: Any) -> AsyncIterator[Fleet]:
    """A gateway that starts before engines in these modes."""
    engines = [Engine(delay_s) for _ in modes]
    config = Config.model_validate(
        {
            "version": 1,
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
            "observability": {"access_log": "off"},
            "models": [{"name": MODEL, "pool": "main"}],
            "pools": {"main": {"policy": policy, "endpoints": [{"url": each.url} for each in engines]}},
        }
        | patient(sections)
    )
    try:
        for engine, mode in zip(engines, modes, strict=True):
            await engine.become(mode)
        app = App(config)
        await app.start()
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                yield Fleet(app, engines, http)
        finally:
            await app.stop()
    finally:
        for engine in engines:
            engine.close()
