"""Keeps the newest messages about prompts, to send them to a gateway that has just started."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

PART_BYTES = 96 << 10


class ReplayBuffer:
    """A buffer of encoded messages about prompts; beyond `cap_bytes` bytes, it drops the oldest.

    A gateway that applies the messages gets the same prefix index. The newest ones suffice, because
    engines cache no more prompts than fit into their KV memory.
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
    """Group encoded messages into parts of about PART_BYTES bytes, to send one part at a time.

    There is always at least one part, which may be empty.
    """
    part: list[bytes] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part
