"""A lean HTTP client that notes when its request left and when the answer's first byte reached its socket.

The second moment is the kernel's: this process has other answers to read, and would tell of its own delays. aiohttp's
client would add more than what is measured here. Not here: who asks what and when (bench/load/overload_load.py).
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from time import monotonic, time
from urllib.parse import urlsplit

import msgspec

from gateway.protocol.response_framing import ResponseBody, new_body, parse_head
from planner.bench.timeline import AnswerTimeline
from planner.text_generator import text

_ID = re.compile(rb"\r\nx-request-id: *([^\r]+)", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after-ms: *([0-9]+)", re.IGNORECASE)

SO_TIMESTAMPNS = 35  # Linux, asm-generic/socket.h: with what is read comes when it arrived; Python has no name for it
STAMP = struct.Struct("@qq")  # a timespec of the wall clock


class Asked:
    """One request and its answer. Moments are of time.monotonic; None: it did not come to that.

    sent_s, answered_s  the request was handed to the kernel, the first bytes of the answer reached the socket
    unread_s            how long these lay there until this process read them
    retry_after_s       as told by retry-after-ms
    ended               done when the answer was whole, or the connection over
    """

    __slots__ = ("answered_s", "ended", "id", "retry_after_s", "sent_s", "status", "timeline", "unread_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sent_s = 0.0
        self.answered_s: float | None = None
        self.unread_s = 0.0
        self.status: int | None = None
        self.id = ""
        self.retry_after_s: float | None = None
        self.timeline = AnswerTimeline()
        self.ended: asyncio.Future[None] = loop.create_future()

    def read(self, head: bytes, status: int) -> None:
        self.status = status
        found = _ID.search(head)
        self.id = found[1].decode() if found else ""
        told = _RETRY.search(head)
        self.retry_after_s = int(told[1]) / 1000 if told else None


class Line:
    """One connection, one request at a time. Owns its socket, which does not block."""

    def __init__(self, pool: Lines, sock: socket.socket) -> None:
        self._pool, self._sock = pool, sock
        self._loop = asyncio.get_running_loop()
        self._asked: Asked | None = None
        self._head = b""
        self._body: ResponseBody | None = None
        self.open = True
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(sock, self._readable)

    async def ask(self, request: bytes, asked: Asked) -> None:
        """Send it and read its answer to the end."""
        self._asked, self._head, self._body = asked, b"", None
        asked.sent_s = monotonic()
        try:
            await self._loop.sock_sendall(self._sock, request)  # at once, or else when there is room again
        except OSError:
            self.close()
        await asked.ended

    def close(self) -> None:
        """Whoever waits for an answer waits no more."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()
            if self._asked is not None and not self._asked.ended.done():
                self._asked.ended.set_result(None)

    def _readable(self) -> None:
        try:
            data, about, _, _ = self._sock.recvmsg(256 * 1024, socket.CMSG_SPACE(STAMP.size))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._read(data, age_s(about, time()))
        else:
            self.close()

    def _read(self, data: bytes, unread_s: float) -> None:
        """What came, and how long it lay in the socket."""
        now, asked = monotonic() - unread_s, self._asked
        if asked is None:
            return
        if asked.answered_s is None:
            asked.answered_s, asked.unread_s = now, unread_s
        if self._body is None:
            head, found, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head
            if not found:
                return
            facts = parse_head(head + b"\r\n")
            asked.read(head, facts.status)
            self._body = new_body(facts)
        if data:
            asked.timeline.feed(self._body.feed(data), now)
        if self._body.is_complete:
            self._over(asked)

    def _over(self, asked: Asked) -> None:
        self._asked = None
        self._pool.idle.append(self)
        if not asked.ended.done():
            asked.ended.set_result(None)


def age_s(about: list[tuple[int, int, bytes]], now_s: float) -> float:
    """How long before `now_s`, of the wall clock, the kernel took in what it tells about; 0 if it tells nothing, as
    for the first moments after somebody wants to know."""
    if not about:
        return 0.0
    seconds, nanoseconds = STAMP.unpack(about[0][2])
    return max(0.0, now_s - seconds - nanoseconds / 1e9)


class Lines:
    """Connections to one server, kept alive and used again, the newest first."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._where = str(split.hostname), int(split.port or 80)
        self._all: list[Line] = []
        self.idle: list[Line] = []

    async def ask(self, request: bytes, asked: Asked) -> None:
        """Send it on an idle connection or a new one, and read its answer to the end."""
        line = None
        while self.idle and line is None:
            line = self.idle.pop()
            if not line.open:
                line = None
        if line is None:
            line = await self._connect()
        await line.ask(request, asked)

    async def _connect(self) -> Line:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, self._where)
        line = Line(self, sock)
        self._all.append(line)
        return line

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
