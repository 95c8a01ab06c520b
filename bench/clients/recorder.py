"""A TCP proxy that records the HTTP requests and responses between clients and a gateway.

    python -m bench.clients.recorder PORT GATEWAY_PORT FILE

It listens on 127.0.0.1. All bytes are passed on unchanged, so that clients behave as without the
proxy. The recorded bytes are parsed only when exchanges() is called.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.clients.threaded_server import threaded_server

HOST = "127.0.0.1"
END = b"\r\n\r\n"
LAST_EVENTS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")


class Message(NamedTuple):
    """One HTTP request or response: its first line, its headers and its decoded body."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """Return the value of a header by its lower-case name, or "" if it is absent."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Exchange(NamedTuple):
    """One HTTP request with its response.

    It also has the monotonic time in seconds at which the first byte of the response arrived.
    """

    request: Message
    response: Message | None
    started: float

    @property
    def path(self) -> str:
        return self.request.line.split(" ")[1].partition("?")[0]

    @property
    def method(self) -> str:
        return self.request.line.partition(" ")[0]

    @property
    def status(self) -> int:
        """The HTTP status of the response, or 0 if there was no response."""
        return int(self.response.line.split(" ")[1]) if self.response is not None else 0


class Connection:
    def __init__(self) -> None:
        self.sent = bytearray()
        self.received = bytearray()
        self.times: list[tuple[int, float]] = []

    def add_sent(self, data: bytes) -> None:
        """Record bytes that the client sent, with the time of their arrival."""
        self.times.append((len(self.sent), time.monotonic()))
        self.sent += data

    def exchanges(self) -> Iterator[Exchange]:
        offset, requests = 0, []
        while (read := read_message(bytes(self.sent), offset, is_request=True)) is not None:
            requests.append((read[0], self._time_of(offset)))
            offset = read[1]
        offset = 0
        for request, started in requests:
            has_body = not request.line.startswith("HEAD ")
            received = bytes(self.received)
            answer = read_message(received, offset, has_body=has_body)
            if answer is None:
                answer = read_left_stream(received, offset)
            offset = offset if answer is None else answer[1]
            yield Exchange(request, None if answer is None else answer[0], started)

    def _time_of(self, offset: int) -> float:
        return max(at for start, at in self.times if start <= offset)


def read_message(
    data: bytes, offset: int, *, is_request: bool = False, has_body: bool = True
) -> tuple[Message, int] | None:
    """Parse the HTTP message that begins at `offset` of `data`.

    Returns the message and the offset after it, or None if the message is incomplete.
    """
    end = data.find(END, offset)
    if end < 0:
        return None
    line, *rest = data[offset:end].decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (each.partition(":") for each in rest)]
    if line.split(" ")[1:2] == ["100"]:  # an interim response, before the final one
        return read_message(data, end + 4, is_request=is_request, has_body=has_body)
    values = {name.lower(): value for name, value in headers}
    start = end + 4
    if not has_body:
        return Message(line, headers, b""), start
    if "chunked" in values.get("transfer-encoding", ""):
        read = _read_chunks(data, start)
        return None if read is None else (Message(line, headers, read[0]), read[1])
    length = int(values.get("content-length", 0 if is_request else -1))
    stop = len(data) if length < 0 else start + length
    return None if stop > len(data) else (Message(line, headers, data[start:stop]), stop)


def read_left_stream(data: bytes, offset: int) -> tuple[Message, int] | None:
    """Parse a streamed response whose client closed the connection before its last chunk.

    Some agents exit after the last event. Returns the message, or None for any other response.

    data    bytes that the gateway sent on the connection
    offset  where the response begins
    """
    read = read_message(data + b"0\r\n\r\n", offset)
    if read is None or not any(event in read[0].body for event in LAST_EVENTS):
        return None
    return read[0], len(data)


def _read_chunks(data: bytes, offset: int) -> tuple[bytes, int] | None:
    # Decode a chunked body; return it and the offset after it, or None if incomplete.
    pieces: list[bytes] = []
    while (end := data.find(b"\r\n", offset)) >= 0:
        size = int(data[offset:end].partition(b";")[0], 16)
        offset = end + 2 + size + 2
        if offset > len(data):
            return None
        if size == 0:
            return b"".join(pieces), offset
        pieces.append(data[end + 2 : offset - 2])
    return None


class Recorder:
    """A running TCP proxy: its port, and the HTTP exchanges that it has recorded."""

    def __init__(self, gateway_port: int) -> None:
        self.port = 0
        self._gateway_port = gateway_port
        self._connections: list[Connection] = []

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def exchanges(self) -> list[Exchange]:
        found = [each for connection in self._connections for each in connection.exchanges()]
        return sorted(found, key=lambda exchange: exchange.started)

    def clear(self) -> None:
        self._connections = [Connection() for _ in ()]

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy the bytes of one connection in both directions until both ends are closed."""
        connection = Connection()
        self._connections.append(connection)
        try:
            back, forth = await asyncio.open_connection(HOST, self._gateway_port)
        except OSError:
            writer.close()
            return
        ways = (
            _copy(reader, forth, connection.add_sent),
            _copy(back, writer, connection.received.extend),
        )
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*ways)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Any) -> None:
    try:
        while data := await reader.read(65_536):
            record(data)
            writer.write(data)
            await writer.drain()
    except (ConnectionError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


@contextmanager
def recorder(gateway_port: int, port: int = 0) -> Iterator[Recorder]:
    """Run a recording HTTP proxy in front of `gateway_port` in a thread, during a `with` block."""
    proxy = Recorder(gateway_port)
    with threaded_server(proxy.serve_connection, port) as proxy.port:
        yield proxy


def to_line(exchange: Exchange) -> str:
    """Return a recorded HTTP exchange as one line of JSON.

    Bodies that are not text are replaced by a placeholder.
    """
    request, response = exchange.request, exchange.response
    return json.dumps(
        {
            "line": request.line,
            "headers": request.headers,
            "body": request.body.decode("utf-8", "replace"),
            "status": exchange.status,
            "answer": "" if response is None else response.body.decode("utf-8", "replace"),
        }
    )


def main() -> None:
    """Record a client's HTTP exchanges until standard input ends; write one per line."""
    port, gateway_port, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with recorder(gateway_port, port) as proxy:
        sys.stdin.read()
        file.write_text("".join(to_line(each) + "\n" for each in proxy.exchanges()))


if __name__ == "__main__":
    main()
