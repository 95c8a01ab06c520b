"""A process that acts as an engine with fixed responses, optionally on one CPU core.

    python -m tests.e2e.canned_engine [CORE]    # prints its port

The request's member `user` selects the response:

event:N     a stream with one event of N bytes
ids:N       a stream whose first event lists N bytes of the prompt's token identifiers
answer:N    a JSON response of N bytes
head:N      a response head of N bytes
drip:N      a stream with one event of N bytes, in pieces of 40 bytes
headdrip:N  a response head of N bytes, in pieces of 40 bytes
control     control bytes in the content type
flood       an endless stream
hold        no response

Any other request gets a small JSON response, or a stream of four events.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import cast

import uvloop

MODEL = "demo"
PIECE, SMALL_PIECE = b"x" * 65_536, b"x" * 40
IDS = b"100000," * (len(PIECE) // 7)
_USER = re.compile(rb'"user": ?"([a-z]+):?(\d*)"')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_OK = b"HTTP/1.1 200 OK\r\n"
_JSON = b"content-type: application/json\r\n"
_STREAM = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_USAGE = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}


def _sized(body: bytes, head: bytes = _JSON) -> bytes:
    return b"%b%bcontent-length: %d\r\n\r\n%b" % (_OK, head, len(body), body)


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"model": MODEL, "choices": [choice]}).encode()


_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "hello"},
    "finish_reason": "stop",
}
_ANSWER = _sized(json.dumps({"model": MODEL, "choices": [_CHOICE], "usage": _USAGE}).encode())
_END = _chunk(_event("", "stop")) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_EVENTS = _OK + _STREAM + _chunk(_event("a")) + _chunk(_event("b")) + _END
_MODELS = _sized(
    json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
)
_FLOOD = _chunk(_event("x" * 8192))


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._sending: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            length = _LENGTH.search(head)
            end += 4 + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            request, self._received = self._received[:end], self._received[end:]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        write = self._transport.write
        if request.startswith(b"GET"):
            write(_MODELS if b"/v1/models" in request[:64] else _sized(b""))
            return
        user = _USER.search(request)
        kind, size = ("", 0) if user is None else (user[1].decode(), int(user[2] or 0))
        if kind in ("event", "ids", "answer", "flood", "drip", "headdrip"):
            self._sending = asyncio.get_running_loop().create_task(self._send(kind, size))
        elif kind == "head":
            lines = b"".join(
                b"x-%d: %b\r\n" % (number, b"a" * 1000) for number in range(size // 1000)
            )
            write(_sized(b"{}", lines))
        elif kind == "control":
            write(_sized(b"{}", b"content-type: application/json\x01\x0b\r\n"))
        elif kind != "hold":
            write(_EVENTS if b'"stream": true' in request else _ANSWER)

    async def _send(self, kind: str, size: int) -> None:
        if kind == "flood":
            self._transport.write(_OK + _STREAM)
            while True:
                await self._write(_FLOOD)
        if kind == "headdrip":
            self._transport.write(_OK + b"x-long: ")
            await self._drip(SMALL_PIECE, size)
            self._transport.close()
            return
        before, after = (
            b'data: {"model":"demo","choices":[{"index":0,"delta":{"content":"',
            b'"}}]}\n\n',
        )
        if kind == "drip":
            await self._write(_OK + _STREAM + _chunk(before))
            await self._drip(_chunk(SMALL_PIECE), size)
            await self._write(_chunk(after) + _END)
            return
        if kind in ("event", "ids"):
            piece = PIECE if kind == "event" else IDS
            if kind == "ids":
                first = b'data: {"model":"demo",'
                before, after = (
                    first + b'"prompt_token_ids":[',
                    b"1]," + before.removeprefix(first) + after,
                )
            await self._write(_OK + _STREAM + _chunk(before))
            for _ in range(size // len(piece)):
                await self._write(_chunk(piece))
            await self._write(_chunk(after) + _END)
            return
        before, after = before[6:].replace(b"delta", b"message"), after[:-2]
        pieces = size // len(PIECE)
        length = len(before) + pieces * len(PIECE) + len(after)
        await self._write(_OK + _JSON + b"content-length: %d\r\n\r\n%b" % (length, before))
        for _ in range(pieces):
            await self._write(PIECE)
        await self._write(after)

    async def _drip(self, piece: bytes, size: int) -> None:
        # Write `piece` until it has been written for `size` bytes, in a packet of its own each time.
        for _ in range(size // len(SMALL_PIECE)):
            await self._write(piece)
            await asyncio.sleep(0)

    async def _write(self, data: bytes) -> None:
        self._transport.write(data)
        await self._can_write.wait()


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    uvloop.run(main())
