"""Makes the kernel acknowledge the chunks of a stream with fewer packets."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)  # Linux only


def delay_acks(transport: asyncio.Transport | None) -> None:
    """Let the kernel acknowledge two chunks of a stream with one packet.

    Linux acknowledges each chunk at once (quick-ack mode) on a connection that only receives, which
    costs CPU on both sides. With TCP_QUICKACK off, it waits for a second chunk or 40 ms. A silence
    of 40 ms re-enters quick-ack mode, as before every first token, so this is done once per stream.
    An engine that leaves Nagle's algorithm on waits 40 ms too, once.
    """
    if QUICKACK is not None and transport is not None and not transport.is_closing():
        with suppress(OSError):  # the kernel lacks the option: keep acknowledging each chunk
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)
