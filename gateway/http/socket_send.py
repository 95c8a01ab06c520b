"""Sends bytes to a transport's socket directly, which costs less than writing to the transport.

uvloop's transport also tries to send at once, but takes several times as many instructions.
Compiled builds send in C (_socket_send.c). Builds that are not compiled write to the transports.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop.loop

try:
    from gateway.http._socket_send import send_now as send_now

    DIRECT: Any = uvloop.loop.TCPTransport  # type: ignore[attr-defined]
except ImportError:
    DIRECT = None

    def send_now(descriptor: int, data: bytes, /) -> int:
        """Send as many bytes to a socket as it accepts without waiting; return their number.

        The caller writes the rest to the transport. An error counts as 0 bytes sent; the transport
        then reports it. The transport must be open and have no unsent bytes: otherwise these bytes
        could overtake others, or reach another connection. This pure Python version sends nothing,
        so the caller writes everything to the transport.
        """
        return 0


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """Return the descriptor of an open transport if send_now() may use its socket, else -1.

    The transport must be uvloop's and must not use TLS.
    """
    if type(transport) is not DIRECT:
        return -1
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor
