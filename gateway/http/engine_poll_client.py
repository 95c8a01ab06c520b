"""An HTTP client for the gateway's own requests to an engine: health, metrics, models, tokens.

A thousand engines may be polled every second. Therefore connections are kept open, and a poll costs
one write and one read. Clients' requests use gateway/http/engine_connections.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

from gateway.http.engine_lookup_and_connect import EngineAddresses
from gateway.protocol.response.http_response_parser import FramingError
from gateway.protocol.response.short_response import ShortResponse
from gateway.util.tls_contexts import Encryption

IDLE_S = 4.0  # uvicorn closes connections that have been idle for 5 s
MOST_IDLE = 2


class ConnectError(Exception):
    """Raised when no connection to an engine could be opened; `os_error` has the reason."""

    def __init__(self, os_error: OSError) -> None:
        super().__init__(str(os_error))
        self.os_error = os_error


class ConnectionLostError(Exception):
    """Raised when an engine closes its connection before the first byte of a response."""


class _PollConnection(asyncio.Protocol):
    __slots__ = ("_response", "_waiter", "idle_since", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._response: ShortResponse | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, response: ShortResponse) -> None:
        # Send a request and wait until `response` is complete.
        #
        # Raises ConnectionLostError or FramingError. The connection is closed if the exchange fails
        # or the caller is cancelled.
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionLostError("the engine closed the connection while it was idle")
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        self._response = response
        transport.write(request)
        try:
            await waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = self._response = None
            del waiter  # the traceback in its exception refers to this frame, a reference cycle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response, waiter = self._response, self._waiter
        if response is None or waiter is None:  # the engine sent bytes without a request
            self.close()
            return
        try:
            response.feed(data)
        except FramingError as error:
            self._resolve(error)
            return
        if response.is_complete:
            self._resolve(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        response = self._response
        if response is None:
            return
        if exc is None and response.end():
            self._resolve(None)
        elif response.status:
            self._resolve(FramingError("the response ended too early"))
        else:
            self._resolve(ConnectionLostError(str(exc or "closed")))

    def _resolve(self, error: Exception | None) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class PollClient:
    """A client for short HTTP requests to one engine, with a small pool of connections."""

    __slots__ = ("_addresses", "_encryption", "_head", "_idle", "_key_header", "_path")

    def __init__(self, url: str, addresses: EngineAddresses | None = None) -> None:
        """Create a client without connecting.

        addresses  lookups of the engine's host, shared with other clients; None: not shared
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._addresses = addresses or EngineAddresses(parts.hostname or "", port)
        self._path = parts.path.rstrip("/")
        self._head = f" HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: */*\r\nuser-agent: penstock\r\n"
        self._encryption: Encryption | None = None
        self._key_header: Mapping[str, str] = {}
        self._idle: list[_PollConnection] = []

    def configure(self, key_header: Mapping[str, str], encryption: Encryption | None) -> None:
        """Set the API key header and the TLS settings for later requests to the engine.

        Idle connections are closed if the TLS settings differ.
        """
        if encryption is not self._encryption:
            self.close()
        self._key_header, self._encryption = key_header, encryption

    async def get(self, path: str, timeout_s: float, limit: int) -> tuple[int, bytes]:
        """Send a GET request for `path`; return the status and at most `limit` bytes of the body.

        If an idle connection turns out to be closed, the request is sent again on a new one. Raises
        ConnectError, ConnectionLostError, FramingError, or TimeoutError after `timeout_s` seconds.
        """
        return await self._send(self._request("GET", path, ""), timeout_s, limit)

    async def post(self, path: str, body: bytes, timeout_s: float, limit: int) -> tuple[int, bytes]:
        """Send a POST request with a JSON body; everything else is as in get().

        If an idle connection turns out to be closed, the request is sent again, so the engine may
        process it twice.
        """
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return await self._send(self._request("POST", path, fields) + body, timeout_s, limit)

    def _request(self, method: str, path: str, fields: str) -> bytes:
        key = "".join(f"{name}: {value}\r\n" for name, value in self._key_header.items())
        return f"{method} {self._path}{path}{self._head}{key}{fields}\r\n".encode()

    async def _send(self, request: bytes, timeout_s: float, limit: int) -> tuple[int, bytes]:
        async with asyncio.timeout(timeout_s):
            kept = self._take_idle()
            if kept is not None:
                response = ShortResponse(limit)
                try:
                    return await self._exchange(kept, request, response)
                except ConnectionLostError:
                    if response.has_begun:
                        raise
            return await self._exchange(await self._open(timeout_s), request, ShortResponse(limit))

    async def _exchange(
        self, connection: _PollConnection, request: bytes, response: ShortResponse
    ) -> tuple[int, bytes]:
        await connection.exchange(request, response)
        if response.can_be_followed and len(self._idle) < MOST_IDLE:
            connection.idle_since = monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return response.status, bytes(response.body)

    def _take_idle(self) -> _PollConnection | None:
        # Take the most recently used idle connection; return None if all were idle too long.
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _open(self, within_s: float) -> _PollConnection:
        encryption, addresses = self._encryption, self._addresses
        name = None if encryption is None else encryption.server_name or addresses.host
        try:
            _, connection = await addresses.connect(
                _PollConnection,
                within_s / 2,  # an answer needs some of the time, too
                within_s,
                ssl=None if encryption is None else encryption.context,
                server_hostname=name,
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectError(error) from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
