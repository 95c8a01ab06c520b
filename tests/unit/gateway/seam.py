"""A client connection without a socket, bytes in by hand and answers out, and the requests that tests send over it.

Used by tests of the seam between the front and the lobby: what one reads must be what the other would have read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from aiohttp import web

from gateway.answer import Failure, GatewayError
from gateway.client import Client
from gateway.config import Limits
from gateway.connections import ClientConnections
from gateway.front import Front
from gateway.lobby import Lobby
from gateway.networks import Networks
from gateway.openai import Api
from gateway.outbox import Outbox

TURNS = 24  # of the event loop: more than any answer here takes


class Pipe(asyncio.Transport):
    """A transport that keeps what is written and delivers what a test says."""

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
        """As the loop would; then turn it until everything that can happen has happened."""
        if not self.closed:
            self.protocol.data_received(data)
        await turns()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Seen(NamedTuple):
    """What came of some bytes: the answers as (status, body), whether the connection ended, what `serve` was given."""

    answers: list[tuple[int, bytes]]
    ended: bool
    served: list[tuple[str, bytes, str | None]]
    moved: bool


class Bytes:
    """Memory for bodies, as gateway/gate.py has it."""

    def __init__(self) -> None:
        self.held, self.most = 0, 2**40

    def hold(self, body_bytes: int) -> int:
        if self.held + body_bytes > self.most:
            raise GatewayError(Failure.OVERLOADED, "full")
        self.held += body_bytes
        return body_bytes

    def release(self, body_bytes: int) -> None:
        self.held -= body_bytes
        assert self.held >= 0


class House:
    """Makes connections whose requests are answered with their own length, at once or after a turn of the loop."""

    def __init__(self, slow: bool = False) -> None:
        self._slow = slow
        self._outbox = Outbox(asyncio.get_running_loop())
        self._manager = web.Server(self._ordinary, handler_cancellation=True)
        self.served: list[tuple[str, bytes, str | None]] = []
        self.limits = Limits()
        self.hold: Callable[[int], None] = lambda _: None
        self.budget = Bytes()
        self.refused: list[str] = []
        self.fronts = ClientConnections(self.budget, Networks(()), self.refused.append)

    def lobby(self) -> Lobby:
        return Lobby(self._serve, self.fronts, self.limits, self._outbox, self._manager)

    def front(self) -> Front:
        return Front(self._serve, self.fronts, self.limits, self._outbox, self.lobby)

    async def see(self, protocol: Front | Lobby, parts: Sequence[bytes]) -> Seen:
        """Deliver the parts one by one to a new connection of this protocol."""
        self.served.clear()
        pipe = Pipe(protocol)
        protocol.connection_made(pipe)
        await turns()
        for part in parts:
            await pipe.deliver(part)
        seen = Seen(_answers(pipe.text), pipe.closed or pipe.half_closed, [*self.served], pipe.protocol is not protocol)
        pipe.close()
        await turns()
        assert len(self.fronts) == 0
        assert self.budget.held == 0
        return seen

    async def _serve(self, client: Client, api: Api) -> None:
        try:
            body = await client.body(self.hold)
        except GatewayError as error:
            client.refuse(error, "req_1")
            return
        if self._slow:
            await asyncio.sleep(0)
        self.served.append((str(api), body, client.headers.get("x-mark")))
        client.answer(200, json.dumps({"bytes": len(body)}).encode(), [("x-request-id", "req_1")])

    async def _ordinary(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.json_response({"path": request.path}, status=404)


def _answers(text: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while text:
        head, _, text = text.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        lengths = [int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")]
        status, length = int(lines[0].split()[1]), lengths[0] if lengths else 0
        if status != 100:
            found.append((status, text[:length]))
        text = text[length:]
    return found


def request(body: bytes = b"{}", *fields: str, path: str = Api.CHAT, length: str | None = None) -> bytes:
    """An ordinary request, unless the arguments make it another."""
    framing = f"Content-Length: {len(body)}" if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: test", *fields, framing, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


ORDINARY = [
    request(),
    request(b'{"model":"demo"}', "X-Mark: 1"),
    request(b"x" * 300, "x-mark: two words, and more", path=Api.COMPLETIONS),
    request(b"", "Connection: keep-alive", "Authorization: Bearer sk-a"),
    request(request(path="/v1/smuggled"), "X-Mark: a request inside"),
    request(b"{}", length="CONTENT-LENGTH:2"),
]
ODD = [
    b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n",
    request(b"2\r\n{}\r\n0\r\n\r\n", length="Transfer-Encoding: chunked"),
    request(path="/v1/embeddings"),
    request(path=f"{Api.CHAT}?api-version=1"),
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
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
