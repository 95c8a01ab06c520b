"""What a connection needs to send a request to an engine: the request's body, and timeouts."""

from __future__ import annotations

from typing import Protocol

import msgspec


class RequestPayload(Protocol):
    """The body of a request to an engine.

    The body is read once, when the request is sent, and may be freed after that.
    """

    @property
    def body(self) -> bytes: ...


class UpstreamTimeouts(msgspec.Struct, frozen=True):
    """Timeouts in seconds: to connect, to the first byte of a response, and between two chunks."""

    connect_s: float
    first_byte_s: float
    stall_s: float
