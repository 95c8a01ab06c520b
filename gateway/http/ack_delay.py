"""Lets the kernel acknowledge the chunks of a stream with fewer packets, to save CPU time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)  # Linux only


def delay_acks(transport: asyncio.Transport | None) -> None:
    """Let the kernel acknowledge two chunks of a stream with one packet.

    By default, Linux acknowledges each chunk immediately (quick-ack mode) on a connection that only
    receives. That costs CPU time on both sides. With TCP_QUICKACK off, Linux waits up to 40 ms for
    a second chunk, and acknowledges both together.

    Call this once per stream, after its first token: a silence of 40 ms, as before the first token,
    turns quick-ack mode on again. It delays the stream once by up to 40 ms if the engine uses
    Nagle's algorithm.
    """
    if QUICKACK is not None and transport is not None and not transport.is_closing():
        with suppress(OSError):  # the kernel lacks the option: keep acknowledging each chunk
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)
