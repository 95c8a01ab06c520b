"""Runs a gateway in front of fake engines that answer, refuse connections or reset them."""

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
from tests.long_timeouts import patient

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
    ANSWERS = "answers"
    REFUSES = "refuses"
    RESETS = "resets"


class Engine:
    """A fake engine that keeps its port while it stops, fails or restarts.

    posts      number of received requests, by the gateway's request identifier
    delay_s    seconds from a request to its answer
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.posts: Counter[str] = Counter()
        self.delay_s = delay_s
        self.mode = Mode.REFUSES
        self._socket = _bind(0)
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def switch_to(self, mode: Mode) -> None:
        # Change the mode. Open connections are reset unless the new mode is ANSWERS.
        if mode is not Mode.ANSWERS:
            for writer in tuple(self._writers):
                _reset(writer)
        if self._server is not None and mode is Mode.REFUSES:
            self._server.close()
            self._server = None
            # A bound socket that does not listen refuses connections.
            self._socket = _bind(self.port)
        elif self._server is None and mode is not Mode.REFUSES:
            self._server = await asyncio.start_server(
                self._serve_connection, sock=self._socket, backlog=512
            )
        self.mode = mode

    def close(self) -> None:
        for writer in tuple(self._writers):
            _reset(writer)
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if head.startswith(b"GET"):
            _write_json(writer, MODELS if b"/v1/models" in head else {})
            return
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        await reader.readexactly(int(lines[b"content-length"]))
        self.posts[lines[b"x-request-id"].decode()] += 1
        await asyncio.sleep(self.delay_s)
        _write_json(writer, ANSWER)


def _bind(port: int) -> socket.socket:
    tcp_socket = socket.socket()
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tcp_socket.bind(("127.0.0.1", port))
    tcp_socket.setblocking(False)
    return tcp_socket


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


def _write_json(writer: asyncio.StreamWriter, body: object) -> None:
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(raw) + raw)


class Fleet:
    def __init__(self, app: App, engines: Sequence[Engine], http: aiohttp.ClientSession) -> None:
        self.app = app
        self.engines = engines
        self.http = http
        self._request_count = 0

    async def ask(self) -> int:
        self._request_count += 1
        body = {"model": MODEL, "prompt": f"{self._request_count} " * 64, "max_tokens": 1}
        async with self.http.post(f"{self.app.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def ask_concurrently(self, times: int) -> Counter[int]:
        return Counter(await asyncio.gather(*(self.ask() for _ in range(times))))

    async def load(self, clients: int, until: asyncio.Event) -> Counter[int]:
        # Send requests continuously from `clients` clients until the event is set.
        #
        # Returns the number of responses by status code.
        statuses: Counter[int] = Counter()

        async def client() -> None:
            while not until.is_set():
                statuses[await self.ask()] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return statuses

    async def ask_timed(self) -> tuple[int, float]:
        # Send one request; return its status code and the seconds that it took.
        began = monotonic()
        return await self.ask(), monotonic() - began


@asynccontextmanager
async def fleet(
    modes: Sequence[Mode], *, policy: str, delay_s: float = 0.0, **sections: Any
) -> AsyncIterator[Fleet]:
    engines = [Engine(delay_s) for _ in modes]
    config = Config.model_validate(
        {
            "version": 1,
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
            "observability": {"access_log": "off"},
            "models": [{"name": MODEL, "pool": "main"}],
            "pools": {
                "main": {"policy": policy, "endpoints": [{"url": engine.url} for engine in engines]}
            },
        }
        | patient(sections)
    )
    try:
        for engine, mode in zip(engines, modes, strict=True):
            await engine.switch_to(mode)
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
