"""Limits how much of a response is processed at once, so that other requests do not wait. No I/O.

A few bytes of an engine may cause much work. An example is the last event of a translated stream,
which repeats the whole answer. Such work is done in steps of at most about a millisecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

STEP_BYTES = 32 * 1024
"""Number of bytes of input, or of output, after which a step ends."""


class OutputQueue:
    """A queue of output that is generated only when it is taken, about STEP_BYTES at a time.

    Output is taken in the order in which add() was called.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[Iterator[bytes]] = deque()

    def __bool__(self) -> bool:
        """Return whether an iterable of output waits, even if that iterable yields nothing."""
        return bool(self._waiting)

    def add(self, pieces: Iterator[bytes]) -> None:
        """Append output as an iterable of pieces. No piece should be longer than STEP_BYTES."""
        self._waiting.append(pieces)

    def take(self) -> bytes:
        """Generate and return the next output: at least STEP_BYTES bytes, or all that is left."""
        taken, size = list[bytes](), 0
        while self._waiting:
            for piece in self._waiting[0]:
                taken.append(piece)
                size += len(piece)
                if size >= STEP_BYTES:
                    return b"".join(taken)
            self._waiting.popleft()
        return b"".join(taken)

    def take_all(self) -> bytes:
        """Generate and return all remaining output of the queue in one step."""
        waiting, self._waiting = self._waiting, deque()
        return b"".join(piece for pieces in waiting for piece in pieces)
