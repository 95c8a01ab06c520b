"""A minimal HTTP client that records when a request was sent and when its response arrived.

The arrival time is the kernel's timestamp of the received data, because this process may read the
data late. aiohttp's client would add more delay than the delays to measure.
bench/load/overload_load.py sends the requests.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from time import monotonic, time
from urllib.parse import urlsplit

import msgspec

from gateway.protocol.response.http_response_parser import ResponseBody, new_body, parse_head
from planner.bench.answer_timeline import AnswerTimeline
from planner.text_generator import text

_ID = re.compile(rb"\r\nx-request-id: *([^\r]+)", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after-ms: *([0-9]+)", re.IGNORECASE)

SO_TIMESTAMPNS = 35
"""Linux socket option (asm-generic/socket.h) that makes recvmsg return the time of arrival."""

STAMP = struct.Struct("@qq")  # a timespec of the wall clock


class TimedRequest:
    """One request and its response. Times are in seconds of time.monotonic, or None if not reached.

    sent_s         when the request was passed to the kernel
    answered_s     when the first bytes of the response reached the socket
    unread_s       delay from then until this process read them
    retry_after_s  value of the header retry-after-ms, in seconds
    ended          future that is done when the response is complete or the connection has ended
    """

    __slots__ = (
        "answered_s",
        "ended",
        "id",
        "retry_after_s",
        "sent_s",
        "status",
        "timeline",
        "unread_s",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sent_s = 0.0
        self.answered_s: float | None = None
        self.unread_s = 0.0
        self.status: int | None = None
        self.id = ""
        self.retry_after_s: float | None = None
        self.timeline = AnswerTimeline()
        self.ended: asyncio.Future[None] = loop.create_future()

    def read_head(self, head: bytes, status: int) -> None:
        self.status = status
        request_id = _ID.search(head)
        self.id = request_id[1].decode() if request_id else ""
        retry_after = _RETRY.search(head)
        self.retry_after_s = int(retry_after[1]) / 1000 if retry_after else None


class TimedConnection:
    """A non-blocking HTTP connection that notes the times of a request.

    It serves one request at a time.
    """

    def __init__(self, pool: ConnectionPool, sock: socket.socket) -> None:
        self._pool, self._sock = pool, sock
        self._loop = asyncio.get_running_loop()
        self._asked: TimedRequest | None = None
        self._head = b""
        self._body: ResponseBody | None = None
        self.open = True
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(sock, self._readable)

    async def send(self, request: bytes, timed: TimedRequest) -> None:
        self._asked, self._head, self._body = timed, b"", None
        timed.sent_s = monotonic()
        try:
            await self._loop.sock_sendall(self._sock, request)
        except OSError:
            self.close()
        await timed.ended

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()
            if self._asked is not None and not self._asked.ended.done():
                self._asked.ended.set_result(None)

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(256 * 1024, socket.CMSG_SPACE(STAMP.size))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._read(data, age_s(ancillary, time()))
        else:
            self.close()

    def _read(self, data: bytes, unread_s: float) -> None:
        # Process bytes that were in the socket for `unread_s` seconds before being read.
        now, timed = monotonic() - unread_s, self._asked
        if timed is None:
            return
        if timed.answered_s is None:
            timed.answered_s, timed.unread_s = now, unread_s
        if self._body is None:
            head, is_complete, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head
            if not is_complete:
                return
            facts = parse_head(head + b"\r\n")
            timed.read_head(head, facts.status)
            self._body = new_body(facts)
        if data:
            timed.timeline.feed(self._body.feed(data), now)
        if self._body.is_complete:
            self._finish(timed)

    def _finish(self, timed: TimedRequest) -> None:
        self._asked = None
        self._pool.idle.append(self)
        if not timed.ended.done():
            timed.ended.set_result(None)


def age_s(ancillary: list[tuple[int, int, bytes]], now_s: float) -> float:
    """Return the seconds since the kernel received data, by the timestamp that came with the data.

    ancillary  additional data of recvmsg, with the kernel's timestamp
    now_s      current wall-clock time

    Returns 0 without a timestamp. The kernel omits it for a moment after timestamps are enabled.
    """
    if not ancillary:
        return 0.0
    seconds, nanoseconds = STAMP.unpack(ancillary[0][2])
    return max(0.0, now_s - seconds - nanoseconds / 1e9)


class ConnectionPool:
    """A pool of HTTP connections to one server.

    The connection that was used last is reused first.
    """

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._address = str(split.hostname), int(split.port or 80)
        self._all: list[TimedConnection] = []
        self.idle: list[TimedConnection] = []

    async def send(self, request: bytes, timed: TimedRequest) -> None:
        """Send a request on an idle or a new connection, and read its response to the end."""
        connection = None
        while self.idle and connection is None:
            connection = self.idle.pop()
            if not connection.open:
                connection = None
        if connection is None:
            connection = await self._connect()
        await connection.send(request, timed)

    async def _connect(self) -> TimedConnection:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        connection = TimedConnection(self, sock)
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def request(prompt_tokens: int, output_tokens: int, *key: object) -> bytes:
    """Return the bytes of a streaming chat request, formatted as an SDK sends it.

    key  text that makes the prompt unique
    """
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
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        "content-type: application/json\r\naccept: text/event-stream\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
