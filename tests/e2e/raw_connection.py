"""A client connection that sends raw bytes, and parses the HTTP/1.1 responses strictly."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any, NamedTuple, Self

WITHIN_S = 60.0


class Answer(NamedTuple):
    """One HTTP response.

    body     the body, without chunk framing
    framing  "length", "chunked" or "close"
    """

    status: int
    headers: dict[str, str]
    body: bytes
    framing: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        # Return the error object of the body.
        #
        # Raises AssertionError unless it has exactly the shape of OpenAI's errors.
        body = self.json
        assert set(body) == {"error"}, body
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, body
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return dict(error)


class RawConnection:
    def __init__(self, port: int, receive_bytes: int | None = None, address: str = "") -> None:
        """Connect to `port` of 127.0.0.1.

        receive_bytes  size of the socket's receive buffer; None: the default
        address        local address to connect from, in 127.0.0.0/8
        """
        self.socket = socket.socket()
        if address:
            self.socket.bind((address, 0))
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(WITHIN_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self) -> Answer:
        # Read the next response to its end. Raises AssertionError if there is none.
        first = self._file.readline()
        assert first.startswith(b"HTTP/1."), f"no answer but {first!r}"
        headers: dict[str, str] = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value.strip()
        status = int(first.split()[1])
        if status == 100:
            return Answer(status, headers, b"", "length")
        body, framing = self._body(headers)
        return Answer(status, headers, body, framing)

    def is_closed(self) -> bool:
        # Wait for the next byte or the end; return True if the peer closed the connection.
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def _body(self, headers: dict[str, str]) -> tuple[bytes, str]:
        if headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in headers
            return b"".join(iter(self._chunk, b"")), "chunked"
        if "content-length" in headers:
            return self._file.read(int(headers["content-length"])), "length"
        return self._file.read(), "close"

    def _chunk(self) -> bytes:
        size = int(self._file.readline(), 16)
        payload = self._file.read(size)
        assert self._file.read(2) == b"\r\n"
        return payload


def post(
    body: bytes | dict[str, Any],
    path: str = "/v1/chat/completions",
    *headers: str,
    version: str = "1.1",
) -> bytes:
    payload = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: test",
        "Content-Type: application/json",
        *headers,
    ]
    return (
        "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode("latin-1") + payload
    )
