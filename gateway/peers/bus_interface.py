"""The interface of the message bus over which gateways that share state exchange frames.

A frame is a sequence of bytes that contains a message (peer_messages.py). Delivery is best-effort:
frames may be lost or late, and no sender waits. Frames of one sender arrive in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

FRAME_CAP_BYTES = 256 << 10
"""Maximum bytes of a frame. Longer frames are never sent, and are dropped unread when received."""

BACKLOG_CAP_BYTES = 4 << 20
"""Maximum bytes of frames that wait to be sent; beyond it, the oldest frame is dropped."""

ID_BYTES = 8
BROADCAST = bytes(ID_BYTES)

FrameHandler = Callable[[bytes, float], None]
"""A function that receives a frame and its age in seconds. It must return immediately and must not
raise."""

DropCounter = Callable[[str], None]
"""A function that counts a dropped frame; its argument is the reason."""


class BusState(msgspec.Struct, frozen=True):
    """The state of the message bus between gateways at one moment.

    connected      whether frames can be sent and received
    staleness_s    seconds since frames could last be received; 0 while connected
    backlog_bytes  bytes that wait to be sent
    gaps           number of reconnections after which frames may be missing
    problem        why the bus is not connected; "" while connected, and before the first failure
    """

    connected: bool
    staleness_s: float
    backlog_bytes: int
    gaps: int
    problem: str = ""


class Bus(Protocol):
    """A message bus that transports frames of bytes between gateways.

    A gateway may receive the frames that it has sent itself, and has to ignore them.
    """

    async def start(self, own_id: bytes, deliver: FrameHandler) -> None:
        """Begin to connect to the other gateways, and return immediately.

        own_id   the id of this gateway, which is its address on the bus
        deliver  function that is called with each received frame
        """
        ...

    async def stop(self) -> None:
        """Send the waiting frames for a fraction of a second at most, then disconnect."""
        ...

    def publish(self, frame: bytes, to: bytes = BROADCAST) -> None:
        """Queue a frame for one gateway, or for all. This never blocks and never raises."""
        ...

    def state(self, now: float) -> BusState: ...


class Backlog:
    """A queue of frames that wait to be sent, with a limit in bytes.

    Above the limit, the oldest frames are dropped and counted.
    """

    __slots__ = ("_cap_bytes", "_count_drop", "_frames", "bytes")

    def __init__(self, count_drop: DropCounter, cap_bytes: int = BACKLOG_CAP_BYTES) -> None:
        self._count_drop = count_drop
        self._cap_bytes = cap_bytes
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, to: bytes, frame: bytes) -> None:
        if len(frame) > FRAME_CAP_BYTES:
            self._count_drop("too_long")
            return
        self._frames.append((to, frame))
        self.bytes += len(frame)
        while self.bytes > self._cap_bytes:
            self.pop_oldest()
            self._count_drop("backlog")

    def pop_oldest(self) -> tuple[bytes, bytes]:
        """Remove the oldest frame and return it as (recipient, frame)."""
        to, frame = self._frames.popleft()
        self.bytes -= len(frame)
        return to, frame
