"""Bus: how gateways of one fleet hear each other. What they say is view.py's; a bus moves sealed frames.

A bus is advisory: frames may be lost or come late, and nobody waits for one. Each sender's frames come in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

FRAME_CAP_BYTES = 256 << 10
"""A longer frame is nobody's: dropped before it is looked at, and never sent."""

BACKLOG_CAP_BYTES = 4 << 20
"""What may wait to be sent; beyond it the oldest goes."""

ID_BYTES = 8
EVERYBODY = bytes(ID_BYTES)

Deliver = Callable[[bytes, float], None]
"""Takes a frame and its age in seconds, at once and without failing."""

Drop = Callable[[str], None]
"""Counts a frame that was given up, by reason."""


class BusState(msgspec.Struct, frozen=True):
    """connected: frames come and go now. staleness_s: since when it could not have heard something, 0 while it can.
    backlog_bytes: waiting to be sent. gaps: times that it came back and could not hear all that was said meanwhile.
    problem: why it is not connected, in a sentence; "" while it is, or before the first attempt has failed."""

    connected: bool
    staleness_s: float
    backlog_bytes: int
    gaps: int
    problem: str = ""


class Bus(Protocol):
    """What moves frames between gateways. Own frames may come back: who sent one knows it."""

    async def start(self, me: bytes, deliver: Deliver) -> None:
        """Begin to connect, and return at once. `me` is what frames for this gateway alone are addressed to."""
        ...

    async def stop(self) -> None:
        """What waits to be sent is sent if that takes no time, or given up."""
        ...

    def publish(self, frame: bytes, to: bytes = EVERYBODY) -> None:
        """Hand over a frame; never blocks and never fails."""
        ...

    def state(self, now: float) -> BusState: ...


class Backlog:
    """Frames that wait to be sent, at most BACKLOG_CAP_BYTES of them: the oldest goes first, and is counted."""

    __slots__ = ("_cap_bytes", "_drop", "_frames", "bytes")

    def __init__(self, drop: Drop, cap_bytes: int = BACKLOG_CAP_BYTES) -> None:
        self._drop = drop
        self._cap_bytes = cap_bytes
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, to: bytes, frame: bytes) -> None:
        if len(frame) > FRAME_CAP_BYTES:
            self._drop("too_long")
            return
        self._frames.append((to, frame))
        self.bytes += len(frame)
        while self.bytes > self._cap_bytes:
            self.take()
            self._drop("backlog")

    def take(self) -> tuple[bytes, bytes]:
        """(to, frame) of the oldest."""
        to, frame = self._frames.popleft()
        self.bytes -= len(frame)
        return to, frame
