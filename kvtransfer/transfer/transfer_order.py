"""Decides which of several KV transfers to an agent is sent next: by priority, deadline and wait.

No I/O.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Priority(IntEnum):
    """The priorities of KV transfers, most urgent first.

    INTERACTIVE  a client waits for its first token
    BULK         the transfer fills a cache
    MIGRATION    the transfer moves KV away from an engine that will be stopped
    """

    INTERACTIVE = 0
    BULK = 1
    MIGRATION = 2

    @classmethod
    def from_name(cls, word: str) -> Priority:
        """Return the priority of this name, in any case. Raises ValueError for an unknown name."""
        try:
            return cls[word.upper()]
        except KeyError:
            raise ValueError(
                f"priority must be one of {', '.join(cls.__members__).lower()}, not {word!r}"
            ) from None


class QueuedTransfer(msgspec.Struct, frozen=True):
    """A transfer that waits to send KV.

    deadline  time at which the transfer should be complete, in seconds on the owner's clock
    since     time at which it began to wait, on the same clock
    """

    transfer: int
    priority: Priority
    deadline: float
    since: float


class TransferOrder:
    """A queue of KV transfers, ordered by priority, then earliest deadline, then longest wait.

    After each `promote_s` seconds of waiting, a transfer's priority rises by one level. So no
    transfer waits forever.
    """

    def __init__(self, promote_s: float = 0.5) -> None:
        self._promote_s = promote_s
        self._turns: dict[int, QueuedTransfer] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, transfer: int, priority: Priority, deadline: float, now: float) -> None:
        """Add a KV transfer to the queue. One that is already queued keeps its place."""
        self._turns.setdefault(transfer, QueuedTransfer(transfer, priority, deadline, now))

    def remove(self, transfer: int) -> None:
        """Remove a KV transfer from the queue; do nothing if it is not queued."""
        self._turns.pop(transfer, None)

    def next(self, now: float) -> int | None:
        """Return the number of the most urgent transfer in the queue; None if none is queued.

        It stays queued; the caller removes it when it has no more KV to send.
        """
        if len(self._turns) < 2:
            return next(iter(self._turns), None)
        return min(
            self._turns.values(),
            key=lambda turn: (self._effective_priority(turn, now), turn.deadline, turn.since),
        ).transfer

    def _effective_priority(self, turn: QueuedTransfer, now: float) -> int:
        return max(0, turn.priority - int((now - turn.since) / self._promote_s))
