"""The client's side of a request, as the line sees it: gateway/front.py or lobby.py, or a test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.answer import GatewayError
from gateway.large_bodies import Turn
from gateway.upstream import Downstream


class Client(Downstream, Protocol):
    """Reads one request and takes one answer: whole by answer() or refuse(), or as it comes by write()."""

    @property
    def address(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def http_1_0(self) -> bool: ...
    @property
    def closes(self) -> bool:
        """Whether the connection ends with this answer, whose head says so."""
        ...

    def body_at_hand(self) -> bytes:
        """The whole body, if it has come already; else nothing, and body() is to be awaited."""
        ...

    async def body(self, hold: Callable[[int], None], turn: Turn | None = None) -> bytes:
        """The whole body; raises GatewayError when it is refused. `hold` is called with the bytes that have come so
        far. `turn` is awaited before a large body is joined."""
        ...

    def refuse(self, error: GatewayError, request_id: str) -> None: ...
    def answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None: ...
    def hang_up(self) -> None:
        """Close the connection once what was written is out."""
        ...
