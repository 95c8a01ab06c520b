"""Client connections without sockets, to compare the gateway's HTTP parser with that of aiohttp.

Both parsers must read the same bytes as the same requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from aiohttp import web

from gateway.config import Limits
from gateway.http.aiohttp_connection import AiohttpConnection
from gateway.http.client_interface import Client
from gateway.http.connection_limits import ClientConnections
from gateway.http.fast_connection import FastConnection
from gateway.http.write_queue import WriteQueue
from gateway.protocol import api_table
from gateway.protocol.errors import Failure, GatewayError
from gateway.util.client_networks import Networks

TURNS = 24  # loop iterations, more than any response here takes


class FakeTransport(asyncio.Transport):
    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.text = b""
        self.closed = self.half_closed = self.paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.text += bytes(data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def write_eof(self) -> None:
        self.half_closed = True

    def can_write_eof(self) -> bool:
        return True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.Protocol, protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    async def deliver(self, data: bytes) -> None:
        if not self.closed:
            self.protocol.data_received(data)
        await turns()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Outcome(NamedTuple):
    """What a client connection did with some bytes: the answers, and whether it was closed.

    responses     (status, body) of each response
    is_closed     whether the connection was closed
    served        (path, body, X-Mark) of each request that the gateway's own parser served
    has_switched  whether the connection was passed to aiohttp
    """

    responses: list[tuple[int, bytes]]
    is_closed: bool
    served: list[tuple[str, bytes, str | None]]
    has_switched: bool


class FakeBudget:
    def __init__(self) -> None:
        self.reserved, self.capacity = 0, 2**40

    def reserve_body(self, body_bytes: int) -> int:
        if self.reserved + body_bytes > self.capacity:
            raise GatewayError(Failure.OVERLOADED, "the test's memory for bodies is full")
        self.reserved += body_bytes
        return body_bytes

    def release_body(self, body_bytes: int) -> None:
        self.reserved -= body_bytes
        assert self.reserved >= 0


class Harness:
    """Creates client connections whose requests are answered with the length of their body.

    The answer comes at once, or one turn of the event loop later.
    """

    def __init__(self, slow: bool = False) -> None:
        self._slow = slow
        self._outbox = WriteQueue(asyncio.get_running_loop())
        self.turns = self._outbox.request_turns
        self._manager = web.Server(self._serve_other, handler_cancellation=True)
        self.served: list[tuple[str, bytes, str | None]] = []
        self.limits = Limits()
        self.reserve: Callable[[int], None] = lambda _: None
        self.budget = FakeBudget()
        self.refused: list[str] = []
        self.connections = ClientConnections(self.budget, Networks(()), self.refused.append)

    def aiohttp_connection(self) -> AiohttpConnection:
        return AiohttpConnection(
            self._serve, self.connections, self.limits, self._outbox, self._manager
        )

    def fast_connection(self) -> FastConnection:
        return FastConnection(
            self._serve, self.connections, self.limits, self._outbox, self.aiohttp_connection
        )

    async def deliver(
        self, protocol: FastConnection | AiohttpConnection, parts: Sequence[bytes]
    ) -> Outcome:
        self.served.clear()
        transport = FakeTransport(protocol)
        protocol.connection_made(transport)
        await turns()
        for part in parts:
            await transport.deliver(part)
        outcome = Outcome(
            _parse_responses(transport.text),
            transport.closed or transport.half_closed,
            [*self.served],
            transport.protocol is not protocol,
        )
        transport.close()
        await turns()
        assert len(self.connections) == 0
        assert self.budget.reserved == 0
        return outcome

    async def _serve(self, client: Client, api: api_table.Api) -> None:
        try:
            body = await client.read_body(self.reserve)
        except GatewayError as error:
            client.send_error(error, "req_1")
            return
        if self._slow:
            await asyncio.sleep(0)
        self.served.append((api.path, body, client.headers.get("x-mark")))
        client.send_response(
            200, json.dumps({"bytes": len(body)}).encode(), [("x-request-id", "req_1")]
        )

    async def _serve_other(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.json_response({"path": request.path}, status=404)


def _parse_responses(text: bytes) -> list[tuple[int, bytes]]:
    responses: list[tuple[int, bytes]] = []
    while text:
        head, _, text = text.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        lengths = [int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")]
        status, length = int(lines[0].split()[1]), lengths[0] if lengths else 0
        if status != 100:
            responses.append((status, text[:length]))
        text = text[length:]
    return responses


def request(
    body: bytes = b"{}", *fields: str, path: str = api_table.CHAT.path, length: str | None = None
) -> bytes:
    # Build a POST request with a Content-Length, unless the arguments say otherwise.
    framing = f"Content-Length: {len(body)}" if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: test", *fields, framing, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


# Requests that the fast connection serves itself.
ORDINARY = [
    request(),
    request(b'{"model":"demo"}', "X-Mark: 1"),
    request(b"x" * 300, "x-mark: two words, and more", path=api_table.COMPLETIONS.path),
    request(path=f"{api_table.EMBEDDINGS.path}?api-version=1"),
    request(b"", "Connection: keep-alive", "Authorization: Bearer sk-a"),
    request(request(path="/v1/smuggled"), "X-Mark: a request inside"),
    request(b"{}", length="CONTENT-LENGTH:2"),
]
# Requests that it leaves to aiohttp, after which the connection goes on.
ODD = [
    b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n",
    request(b"2\r\n{}\r\n0\r\n\r\n", length="Transfer-Encoding: chunked"),
    request(path="/v1/unknown"),
    request(path=f"{api_table.CHAT.path}?quoted='1'"),
    request(b"{}", "X-Empty:"),
    request(b"{}", "X-Mark:  two blanks"),
    request(b"{}", "X-Mark: same", "X-Mark: same"),
    request(b"{}", "X_Under: 1"),
    request(b"{}", "X-Mark: \xe9"),
    request(b"{}", "X-Mark: a\tb"),
    request(b"{}", "Content-Encoding: identity"),
    request(b"{}", "TE: trailers"),
    request(b"{}", length="Content-Length: 02"),
    request(b"{}", "Keep-Alive: timeout=5"),
]
# Requests that it leaves to aiohttp, after which the connection closes.
LAST = [
    request(b"{}", "Connection: close"),
    request(b"{}", length="Content-Length: 2\r\nContent-Length: 2"),
    request(b"{}", length="Content-Length: 2, 2"),
    request(b"{}", length="Content-Length: +2"),
    request(b"{}", length="Content-Length: 2\r\nTransfer-Encoding: chunked"),
    request(b"{}", length="Content-Length : 2"),
    request(b"{}", "X-Folded: a\r\n b"),
    request(b"{}", "X-Mark: a\rb"),
    request(b"{}", "X-Mark: a\x00b"),
    request(b"{}", "X-Mark"),
    request(b"{}", "Host: other"),
    request(b"{}").replace(b"\r\n", b"\n"),
    request(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"),
    request(b"{}").replace(b"HTTP/1.1", b"HTTP/2.0"),
    request(b"{}").replace(b"Host: test\r\n", b""),
    request(b"{}", length="Content-Length: 999999999"),
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
]
