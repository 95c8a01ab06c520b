"""A lean HTTP client that notes when its request's last byte left and when the answer's first byte came.

On asyncio's own loop a write goes out within write(); aiohttp's client would add more than what is measured here. Not
here: who asks what and when (overload_load.py).
"""

from __future__ import annotations

import asyncio
import re
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import msgspec

from gateway.framing import Body, body_for, parse_head
from planner.bench.timeline import Timeline
from planner.words import text

_ID = re.compile(rb"\r\nx-request-id: *([^\r]+)", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after-ms: *([0-9]+)", re.IGNORECASE)


class Asked:
    """One request and its answer. Moments are of time.monotonic; None: it did not come to that.

    sent_s, answered_s  the last byte of the request left, the first byte of the answer came
    retry_after_s       as told by retry-after-ms
    ended               done when the answer was whole, or the connection over
    """

    __slots__ = ("answered_s", "ended", "id", "retry_after_s", "sent_s", "status", "timeline")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sent_s = 0.0
        self.answered_s: float | None = None
        self.status: int | None = None
        self.id = ""
        self.retry_after_s: float | None = None
        self.timeline = Timeline()
        self.ended: asyncio.Future[None] = loop.create_future()

    def read(self, head: bytes, status: int) -> None:
        self.status = status
        found = _ID.search(head)
        self.id = found[1].decode() if found else ""
        told = _RETRY.search(head)
        self.retry_after_s = int(told[1]) / 1000 if told else None


class Line(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, pool: Lines) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._asked: Asked | None = None
        self._head = b""
        self._body: Body | None = None

    def ask(self, request: bytes, asked: Asked) -> None:
        assert self._transport is not None
        self._asked, self._head, self._body = asked, b"", None
        asked.sent_s = monotonic()
        self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now, asked = monotonic(), self._asked
        if asked is None:
            return
        if asked.answered_s is None:
            asked.answered_s = now
        if self._body is None:
            head, found, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head
            if not found:
                return
            facts = parse_head(head + b"\r\n")
            asked.read(head, facts.status)
            self._body = body_for(facts)
        if data:
            asked.timeline.feed(self._body.feed(data), now)
        if self._body.ended:
            self._over(asked)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._asked is not None and not self._asked.ended.done():
            self._asked.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _over(self, asked: Asked) -> None:
        self._asked = None
        self._pool.idle.append(self)
        if not asked.ended.done():
            asked.ended.set_result(None)


class Lines:
    """Connections to one server, kept alive and used again, the newest first."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._where = str(split.hostname), int(split.port or 80)
        self._all: list[Line] = []
        self.idle: list[Line] = []

    async def ask(self, request: bytes, asked: Asked) -> None:
        """Send it and read its answer to the end."""
        line = None
        while self.idle and line is None:
            line = self.idle.pop()
            if not line.open:
                line = None
        if line is None:
            _, line = await asyncio.get_running_loop().create_connection(lambda: Line(self), *self._where)
            self._all.append(line)
        line.ask(request, asked)
        await asked.ended

    def close(self) -> None:
        for line in self._all:
            line.close()


def request(prompt_tokens: int, output_tokens: int, *key: object) -> bytes:
    """A streaming chat completion as an SDK would send it; `key` makes its prompt like no other."""
    body = msgspec.json.encode(
        {
            "model": "llama-3.1-70b-fp8",
            "messages": [{"role": "user", "content": text(prompt_tokens, "overload", *key)}],
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}accept: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
