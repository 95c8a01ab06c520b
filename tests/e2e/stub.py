"""A recording engine: writes down every generation request it gets, byte for byte, and when its connection ended.

It runs in a thread of the test's own process, so that its clock is the test's. What it does with a request is said in
the request itself, by the value of `user`: "hold" answers nothing, "drip" streams for ever, "flood" streams as fast as
it is read, "break" closes before an answer or after the last token of a stream, "status:NNN" refuses, "undone:N"
streams `n` choices per prompt, of which it finishes N, and ends the body properly without [DONE]; anything else is
answered at once.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from tests.fair_time import PATIENCE_S

MODEL = "demo"
TEXT = "stub says hello"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_FLOOD = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 8192}}]}).encode() + b"\n\n"


class Recorded:
    """One request: its head and body as they came, and when it came and when its connection was closed."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        self.came_at = monotonic()
        self.closed_at: float | None = None
        self.sent_bytes = 0

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stub:
    """What the tests ask of it: `url`, what was recorded, and to wait until something is so."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Recorded] = []
        self.gets: set[str] = set()
        self._changed = threading.Condition()

    def wait(self, until: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
        """True once `until()` holds; looked at whenever something happened here."""
        with self._changed:
            return self._changed.wait_for(until, within_s)

    def came(self, request: Recorded) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def closed(self, request: Recorded) -> None:
        with self._changed:
            request.closed_at = monotonic()
            self._changed.notify_all()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: requests one after the other, until the other side has gone."""
        open_requests: list[Recorded] = []
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    self.gets.add(head.split(b" ", 2)[1].decode())
                    writer.write(_ordinary(head))
                    continue
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                request = Recorded(head, await reader.readexactly(int(length[15:])))
                open_requests.append(request)
                self.came(request)
                await _answer(request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for request in open_requests:
                self.closed(request)
            writer.close()


def _ordinary(head: bytes) -> bytes:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "stub"}
    body = json.dumps({"object": "list", "data": [model]}).encode() if b"/v1/models" in head else b""
    return _HEAD % (b"application/json", b"content-length: %d\r\n" % len(body)) + body


async def _answer(request: Recorded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    asked = request.json
    what = str(asked.get("user", ""))
    if what == "hold":
        await reader.readexactly(1)
    elif what == "drip":
        await _drip(reader, writer)
    elif what == "flood":
        await _flood(request, writer)
    elif what == "break":
        if asked.get("stream"):
            tokens = b"".join(_event(word) for word in TEXT.split())
            writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(tokens))
        raise ConnectionResetError
    elif what.startswith("undone:"):
        prompts = asked.get("prompt", "")
        choices = range(asked.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1))
        finished = [_event("", index, "stop") for index in choices[: int(what[7:])]]
        events = b"".join([*(_event(TEXT, index) for index in choices), *finished])
        writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(events) + b"0\r\n\r\n")
    elif what.startswith("status:"):
        body = json.dumps({"error": {"message": "as asked", "type": "X", "param": None, "code": 1}}).encode()
        head = f"HTTP/1.1 {what[7:]} As Asked\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
    elif asked.get("stream"):
        events = b"".join(_event(word) for word in TEXT.split()) + b"data: [DONE]\n\n"
        writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(events) + b"0\r\n\r\n")
    else:
        body = json.dumps({"model": asked["model"], "choices": [{"message": {"content": TEXT}}]}).encode()
        writer.write(_HEAD % (b"application/json", b"content-length: %d\r\n" % len(body)) + body)


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A token every 5 ms until the connection ends."""
    writer.write(_HEAD % (b"text/event-stream", _CHUNKED))
    gone = asyncio.ensure_future(reader.read(1))
    while not gone.done():
        writer.write(_chunk(_event("drop")))
        await asyncio.wait((gone,), timeout=0.005)
    raise ConnectionResetError


async def _flood(request: Recorded, writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD % (b"text/event-stream", _CHUNKED))
    while True:
        writer.write(_chunk(_FLOOD))
        request.sent_bytes += len(_FLOOD)
        await writer.drain()


def _event(text: str, index: int = 0, reason: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


@contextmanager
def recording_stub(context: ssl.SSLContext | None = None) -> Iterator[Stub]:
    """A stub that listens on a free port of 127.0.0.1 until the block is left, with TLS if there is a context."""
    stub = Stub()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listening = asyncio.start_server(stub.talk, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(5)
    scheme = "http" if context is None else "https"
    stub.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
