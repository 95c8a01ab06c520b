"""An engine that records every generation request, and when the request's connection was closed.

It runs in a thread of the test process, so that both use the same clock. The request's member
`user` selects the behaviour:

hold          send nothing
drip          stream one token every 5 ms, without end
flood         stream as fast as the client reads
break         close before an answer, or after the last token of a stream
status:NNN    refuse with this status
undone:N      stream `n` choices, finish N of them, and end the body without [DONE]
other         answer at once
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

from bench.clients.threaded_server import threaded_server
from tests.duration_limits import PATIENCE_S

MODEL = "demo"
TEXT = "engine says hello"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_FLOOD = (
    b"data: "
    + json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 8192}}]}).encode()
    + b"\n\n"
)


class RecordedRequest:
    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        self.received_at = monotonic()
        self.closed_at: float | None = None
        self.sent_bytes = 0

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RecordingEngine:
    def __init__(self) -> None:
        self.url = ""
        self.requests: list[RecordedRequest] = []
        self.gets: set[str] = set()
        self._changed = threading.Condition()

    def wait(self, until: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
        # Wait until a condition holds, and check it after each event.
        #
        # Returns False on a timeout.
        with self._changed:
            return self._changed.wait_for(until, within_s)

    def record(self, request: RecordedRequest) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def record_close(self, request: RecordedRequest) -> None:
        with self._changed:
            request.closed_at = monotonic()
            self._changed.notify_all()

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        open_requests: list[RecordedRequest] = []
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    self.gets.add(head.split(b" ", 2)[1].decode())
                    writer.write(_answer_get(head))
                    continue
                length = next(
                    line
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(int(length[15:]))
                if body == b"{}":  # the gateway tries whether the engine has the API
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                    continue
                request = RecordedRequest(head, body)
                open_requests.append(request)
                self.record(request)
                await _answer(request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for request in open_requests:
                self.record_close(request)
            writer.close()


def _answer_get(head: bytes) -> bytes:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "engine"}
    body = (
        json.dumps({"object": "list", "data": [model]}).encode() if b"/v1/models" in head else b""
    )
    return _HEAD % (b"application/json", b"content-length: %d\r\n" % len(body)) + body


async def _answer(
    request: RecordedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    parameters = request.json
    behaviour = str(parameters.get("user", ""))
    if behaviour == "hold":
        await reader.readexactly(1)
    elif behaviour == "drip":
        await _drip(reader, writer)
    elif behaviour == "flood":
        await _flood(request, writer)
    elif behaviour == "break":
        if parameters.get("stream"):
            tokens = b"".join(_event(word) for word in TEXT.split())
            writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(tokens))
        raise ConnectionResetError
    elif behaviour.startswith("undone:"):
        prompts = parameters.get("prompt", "")
        choices = range(parameters.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1))
        finished = [_event("", index, "stop") for index in choices[: int(behaviour[7:])]]
        events = b"".join([*(_event(TEXT, index) for index in choices), *finished])
        writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(events) + b"0\r\n\r\n")
    elif behaviour.startswith("status:"):
        body = json.dumps(
            {"error": {"message": "as asked", "type": "X", "param": None, "code": 1}}
        ).encode()
        head = f"HTTP/1.1 {behaviour[7:]} As Asked\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
    elif parameters.get("stream"):
        events = b"".join(_event(word) for word in TEXT.split()) + b"data: [DONE]\n\n"
        writer.write(_HEAD % (b"text/event-stream", _CHUNKED) + _chunk(events) + b"0\r\n\r\n")
    else:
        body = json.dumps(
            {"model": parameters["model"], "choices": [{"message": {"content": TEXT}}]}
        ).encode()
        writer.write(_HEAD % (b"application/json", b"content-length: %d\r\n" % len(body)) + body)


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD % (b"text/event-stream", _CHUNKED))
    closed = asyncio.ensure_future(reader.read(1))
    while not closed.done():
        writer.write(_chunk(_event("drop")))
        await asyncio.wait((closed,), timeout=0.005)
    raise ConnectionResetError


async def _flood(request: RecordedRequest, writer: asyncio.StreamWriter) -> None:
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
def recording_engine(context: ssl.SSLContext | None = None) -> Iterator[RecordingEngine]:
    engine = RecordingEngine()
    scheme = "http" if context is None else "https"
    with threaded_server(engine.serve_connection, context=context) as port:
        engine.url = f"{scheme}://127.0.0.1:{port}"
        yield engine
