"""The client's side of a request, as the gateway sees it.

Implemented by both kinds of client connection (http/connection.py) and by fakes in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.http.large_bodies import WaitForTurn
from gateway.http.upstream import Downstream
from gateway.protocol.error_shapes import OPENAI, ErrorShape
from gateway.protocol.errors import GatewayError
from gateway.protocol.response_clock import ResponseClock, ResponseLines


class Client(Downstream, Protocol):
    """Supplies one request and takes its response: whole, or in pieces through write()."""

    @property
    def address(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def target(self) -> str:
        """Path and query of the request, for APIs whose path has a variable part."""
        ...

    @property
    def is_http_1_0(self) -> bool: ...
    @property
    def will_close(self) -> bool:
        """Whether the connection closes after this response, whose head must announce it."""
        ...

    clock: ResponseClock
    response_lines: ResponseLines
    """Header lines of every response: the clock, or what a request adds to it."""

    def take_buffered_body(self) -> bytes:
        """Return the body if it has been received already, else nothing; then await body()."""
        ...

    async def read_body(
        self, reserve: Callable[[int], None], wait_for_turn: WaitForTurn | None = None
    ) -> bytes:
        """Return the whole body. `reserve` is called with the bytes received so far.

        `wait_for_turn` is awaited before a large body is joined. Raises GatewayError when the body
        is refused.
        """
        ...

    def send_error(self, error: GatewayError, request_id: str, shape: ErrorShape = OPENAI) -> None:
        """Send an error response in the API's shape."""
        ...

    def send_response(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        """Send a complete JSON response."""
        ...

    def close_after_write(self) -> None:
        """Close the connection after what was written."""
        ...
