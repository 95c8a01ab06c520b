"""The interface between a client connection and the code that serves its request.

Both classes of client connection (http/client_connection.py) implement Client, and so do fakes in
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.http.engine_connections import Downstream
from gateway.http.large_body_parsing import JoinInTurn
from gateway.protocol.error_formats import OPENAI, ErrorFormat
from gateway.protocol.errors import GatewayError
from gateway.protocol.response.date_header import ResponseClock, ResponseLines


class Client(Downstream, Protocol):
    """The client of one request: supplies the request, and receives the response.

    A response is sent complete with send_response(), or in parts with write().
    """

    @property
    def address(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def target(self) -> str:
        """Return the request's path and query, for APIs whose path has a variable part."""
        ...

    @property
    def is_http_1_0(self) -> bool: ...
    @property
    def will_close(self) -> bool:
        """Return whether the connection closes after this response.

        If so, the head of the response must announce it.
        """
        ...

    clock: ResponseClock
    response_lines: ResponseLines
    """Header lines that every response contains: the date, plus those that the current request
    adds."""

    def take_buffered_body(self) -> bytes:
        """Return the request's body if all of it has been received, else b"".

        After b"", the caller must await read_body().
        """
        ...

    async def read_body(
        self, reserve: Callable[[int], None], join_in_turn: JoinInTurn | None = None
    ) -> bytes:
        """Receive the request's body and return all of it.

        reserve       called with the number of bytes received so far; may raise GatewayError
        join_in_turn  joins the pieces of a large body once it may be parsed

        Raises GatewayError if the body is refused.
        """
        ...

    def send_error(self, error: GatewayError, request_id: str, shape: ErrorFormat = OPENAI) -> None:
        """Send a complete error response, in the format of the client's API (`shape`)."""
        ...

    def send_response(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None: ...

    def close_after_write(self) -> None:
        """Close the connection once the bytes written so far have been sent."""
        ...
