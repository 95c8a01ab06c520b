"""Engines and clients that run in the same process as a gateway whose memory is measured.

Their connections keep no data of a request after its answer. So all memory that grows in the
process belongs to the gateway.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

MODELS = b'{"object":"list","data":[{"id":"whole"},{"id":"split"},{"id":"m"}]}'
_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_HANDOFF = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],'
    b'"remote_engine_id":"engine-p","remote_request_id":"chatcmpl-x-0a1b2c3d",'
    b'"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"transfer_mode":"pull"}'
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_SECONDS_PER_TOKEN = 0.01
THINK_S = 1.0


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _usage(prompt: int, tokens: int) -> bytes:
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        *(prompt, tokens),
        prompt + tokens,
    )


def _event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def _token(text: bytes, finish: bytes = b"null") -> bytes:
    return _event(
        b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"%b"},"finish_reason":%b}]}' % (text, finish)
    )


class VirtualEngine:
    """An engine that answers over a socket of this process, and can have a fault.

    fault  how it treats new requests:
           ""        it answers them
           "reset"   it closes the connection, also of health checks
           "cut"     it closes a stream after two tokens
           "silent"  it does not answer, not even health checks
           "error"   it answers with status 500
    """

    def __init__(self, rng: Random) -> None:
        self.fault = ""
        self.url = ""
        self.rng = rng
        self.connections: set[_EngineConnection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _EngineConnection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.break_connections()
        await self._server.wait_closed()

    def break_connections(self) -> None:
        for connection in tuple(self.connections):
            connection.transport.abort()


class _EngineConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return
        body, self._data = rest[:size], rest[size:]
        if self._engine.fault == "reset":
            self.transport.abort()
        elif self._engine.fault != "silent":
            self._respond(head, body)

    def _respond(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            self.transport.write(_answer(MODELS if b"/v1/models" in head[:64] else b""))
        elif body == b"{}":
            self.transport.write(_answer(b"{}", b"400 Bad Request"))
        elif self._engine.fault == "error":
            self.transport.write(_answer(b'{"error":{}}', b"500 Internal Server Error"))
        elif b'"do_remote_decode":true' in body:
            self._later(0.005, self._prefilled, len(body) // 4)
        else:
            match = _TOKENS.search(body)
            tokens = int(match[1]) if match else 16
            is_stream = re.search(rb'"stream": ?true', body) is not None
            begin = self._stream_first if is_stream else self._whole
            self._later(0.01, begin, len(body) // 4, tokens)

    def _later(self, delay_s: float, act: Callable[..., None], *args: int) -> None:
        delay_s *= self._engine.rng.lognormvariate(0.0, 0.7)
        self._timer = asyncio.get_running_loop().call_later(delay_s, act, *args)

    def _prefilled(self, prompt: int) -> None:
        choice = (
            b'{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}'
        )
        self.transport.write(
            _answer(
                b'{"id":"p","model":"m","choices":[%b],"usage":%b,"kv_transfer_params":%b}'
                % (choice, _usage(prompt, 1), _HANDOFF)
            )
        )

    def _whole(self, prompt: int, tokens: int) -> None:
        choice = (
            b'{"index":0,"message":{"role":"assistant","content":"a b"},"finish_reason":"stop"}'
        )
        self.transport.write(
            _answer(
                b'{"id":"c","model":"m","choices":[%b],"usage":%b}'
                % (choice, _usage(prompt, tokens))
            )
        )

    def _stream_first(self, prompt: int, tokens: int) -> None:
        self.transport.write(_STREAM_HEAD + _token(b" a") + _token(b" b"))
        if self._engine.fault == "cut":
            self.transport.close()
            return
        self._later(tokens * _SECONDS_PER_TOKEN, self._stream_rest, prompt, tokens)

    def _stream_rest(self, prompt: int, tokens: int) -> None:
        usage = _event(b'{"id":"c","model":"m","choices":[],"usage":%b}' % _usage(prompt, tokens))
        self.transport.write(
            _token(b" c") + _token(b"", b'"stop"') + usage + _event(b"[DONE]") + b"0\r\n\r\n"
        )


class VirtualClient(asyncio.Protocol):
    """A client in the process of the measured gateway. It sends one request at a time.

    status   status of the last answer; 0 if the connection ended without one
    is_open  whether the connection can be used for another request
    """

    def __init__(self) -> None:
        self.status, self.is_open = 0, False
        self._transport: asyncio.Transport | None = None
        self._head, self._tail, self._left = b"", b"", -1
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request. The returned future is done when the answer or the connection has
        ended.
        """
        self.status, self._head, self._tail, self._left = 0, b"", b"", -1
        self._done = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self.status:
            self._read_body(data)
            return
        self._head += data
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        if separator:
            self.status = int(head[9:12])
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else -1
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        if self._left < 0:
            self._tail = (self._tail + data)[-5:]
            if self._tail == b"0\r\n\r\n":
                self._finish()
            return
        self._left -= len(data)
        if self._left <= 0:
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class VirtualClients:
    """Simulated users of the measured gateway. Each has one request at a time.

    sent   number of requests
    fates  number of requests by HTTP status; "left" counts those whose client disconnected
    """

    def __init__(self, url: str, rng: Random) -> None:
        self.sent, self.fates = 0, Counter[str]()
        self._port, self._rng = int(url.rpartition(":")[2]), rng
        self._wanted = self._waiting = 0
        self._reached: asyncio.Future[None] | None = None
        self._may_send = asyncio.Event()
        self._may_send.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Wait until all requests have ended; no user sends one during the `async with` block."""
        self._may_send.clear()
        while self._waiting:
            await asyncio.sleep(0.1)
        try:
            yield
        finally:
            self._may_send.set()

    async def sent_at_least(self, requests: int) -> None:
        """Wait until all users together have sent at least `requests` requests."""
        if self.sent < requests:
            self._wanted, self._reached = requests, asyncio.get_running_loop().create_future()
            await self._reached

    async def run(self, users: int) -> None:
        """Send requests as `users` concurrent users, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(self._user())

    async def _user(self) -> None:
        loop, rng, client = asyncio.get_running_loop(), self._rng, VirtualClient()
        while True:
            await self._may_send.wait()
            if not client.is_open or rng.random() < 0.05:
                client.close()
                _, client = await loop.create_connection(VirtualClient, "127.0.0.1", self._port)
            leaves_s = rng.uniform(0.0, 0.5) if rng.random() < 0.12 else None
            answered = client.send(self._request())
            self._count()
            self._waiting += 1
            await asyncio.wait([answered], timeout=leaves_s)
            self._waiting -= 1
            if not answered.done():
                client.close()
            self.fates[str(client.status) if answered.done() else "left"] += 1
            await asyncio.sleep(rng.expovariate(1.0 / THINK_S))

    def _count(self) -> None:
        self.sent += 1
        if self._reached is not None and self.sent >= self._wanted and not self._reached.done():
            self._reached.set_result(None)

    def _request(self) -> bytes:
        rng, number = self._rng, self.sent
        words = rng.randint(1000, 3000) if rng.random() < 0.05 else rng.randint(10, 200)
        body: dict[str, Any] = {
            "model": "whole" if rng.random() < 0.65 else "split",
            "stream": rng.random() < 0.65,
            "max_tokens": rng.randint(8, 200),
            "messages": [{"role": "user", "content": f"question {number} " + "and more " * words}],
        }
        kind = rng.random()
        if kind < 0.04:
            body["model"] = f"whale-{number}"
        elif kind < 0.08:
            body["max_tokens"] = 0
        raw = json.dumps(body).encode()
        session = f"s{rng.randrange(40) if rng.random() < 0.7 else number}"
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer sk-{rng.choice('ab')}\r\nx-session-id: {session}\r\n"
            f"x-slo-class: {rng.choice(('standard', 'batch'))}\r\nx-request-id: r{number}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        return head.encode() + raw
