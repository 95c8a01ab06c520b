"""Sends bytes to the socket of a transport directly, without the transport's own steps.

uvloop also tries to send what is written at once, in several times as many instructions. Compiled
builds send in C (_socket_send.c); sources write to the transports.
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
        """Send as many bytes to a socket as it takes without waiting; return their number.

        An error counts as 0 bytes; writing the rest to the transport reports it. The transport must
        be open and have no unsent bytes: else the bytes could overtake others, or reach another
        connection. This form sends nothing.
        """
        return 0


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """Return the descriptor of an open transport if its socket may be sent to directly, else -1.

    It may if the transport is uvloop's and has no TLS.
    """
    if type(transport) is not DIRECT:
        return -1
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor
