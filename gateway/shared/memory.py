"""The youngest part of what a view was told, in order and as it was told: what a newcomer is warmed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

PART_BYTES = 96 << 10


class Memory:
    """Encoded messages, the oldest given up beyond `cap_bytes`. An index is what its prompts made of it, so repeating
    the youngest of them makes the same one: engines remember no more than their KV memory holds either."""

    __slots__ = ("_bodies", "_cap_bytes", "bytes")

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._bodies: deque[bytes] = deque()
        self.bytes = 0

    def keep(self, body: bytes) -> None:
        self._bodies.append(body)
        self.bytes += len(body)
        while self.bytes > self._cap_bytes:
            self.bytes -= len(self._bodies.popleft())

    def all(self) -> tuple[bytes, ...]:
        """As it is now, oldest first."""
        return tuple(self._bodies)


def in_parts(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Some at a time."""
    part: list[bytes] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part
