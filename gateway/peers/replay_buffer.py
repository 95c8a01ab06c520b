"""The newest messages about prompts (the replay buffer), from which a new gateway is warmed up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

PART_BYTES = 96 << 10


class ReplayBuffer:
    """Keeps encoded messages about prompts up to `cap_bytes` bytes, and drops the oldest ones
    beyond that.

    Replaying the messages rebuilds the prefix index. The newest messages suffice, because engines
    hold no more prompts than fit into their KV memory either.
    """

    __slots__ = ("_bodies", "_cap_bytes", "bytes")

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._bodies: deque[bytes] = deque()
        self.bytes = 0

    def append(self, body: bytes) -> None:
        self._bodies.append(body)
        self.bytes += len(body)
        while self.bytes > self._cap_bytes:
            self.bytes -= len(self._bodies.popleft())

    def messages(self) -> tuple[bytes, ...]:
        return tuple(self._bodies)


def split_into_parts(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group the messages into parts of about PART_BYTES; always yields at least one part."""
    part: list[bytes] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part
