"""A server that answers every request with status 429, to measure round trips on this machine.

It uses uvloop and sockets like the gateway, and its response is as long as the gateway's refusals.
It prints its URL when it is ready.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_BODY = (
    b'{"error":{"message":"'
    + b"." * 250
    + b'","type":"overloaded_error","param":null,"code":"slo_shed"}}'
)
_HEAD = (
    "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nx-request-id: req_0\r\n"
)
ANSWER = f"{_HEAD}content-length: {len(_BODY)}\r\n\r\n".encode() + _BODY


class NullConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, has_end, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if has_end and length is not None and len(body) >= int(length[1]):
            self._data = b""
            self._transport.write(ANSWER)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(NullConnection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
