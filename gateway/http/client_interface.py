"""The interface between a client connection and the code that serves its request.

Client is implemented by both classes of client connection (http/client_connection.py) and by fakes
in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.http.large_bodies import JoinInTurn
from gateway.http.upstream import Downstream
from gateway.protocol.error_formats import OPENAI, ErrorFormat
from gateway.protocol.errors import GatewayError
from gateway.protocol.response.date_header import ResponseClock, ResponseLines


class Client(Downstream, Protocol):
    """The client of one request: supplies the request and receives the response.

    A response is sent whole with send_response(), or in pieces with write().
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
        """Return whether the connection closes after this response; the response head must then
        announce that.
        """
        ...

    clock: ResponseClock
    response_lines: ResponseLines
    """Header lines that every response contains: the date, plus those that the current request
    adds."""

    def take_buffered_body(self) -> bytes:
        """Return the request's body if all of it has been received, else b"".

        If the result is b"", the caller must await read_body().
        """
        ...

    async def read_body(
        self, reserve: Callable[[int], None], join_in_turn: JoinInTurn | None = None
    ) -> bytes:
        """Receive the request's body and return all of it.

        `reserve` is called with the number of bytes received so far and may raise GatewayError.
        `join_in_turn` joins the pieces of a large body when it may be parsed. Raises GatewayError
        when the body is refused.
        """
        ...

    def send_error(self, error: GatewayError, request_id: str, shape: ErrorFormat = OPENAI) -> None:
        """Send a complete error response in the format of the client's API (`shape`)."""
        ...

    def send_response(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None: ...

    def close_after_write(self) -> None:
        """Close the client's connection once the bytes written so far have been sent."""
        ...
