"""Injects faults into the sending of KV events: messages are lost, late, repeated or reordered.

KV events report changes of an engine's prefix cache. numbered_event_batches.py builds the messages,
and zmq_publisher.py sends those that this module returns. No I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from mockgpu.fault_grammar import FaultKind

Message: TypeAlias = tuple[int, bytes]
"""A message: the number of its batch of events, and the encoded payload."""

LATE_S = 0.2
"""Seconds by which the fault of late messages delays a message, so that newer ones overtake it."""


class FaultyDelivery:
    """Decides when each message with KV events is sent, if injected faults delay or drop messages.

    strikes  function that returns whether an injected fault of a kind hits the next message
    """

    def __init__(self, strikes: Callable[[FaultKind], bool]) -> None:
        self.strikes = strikes
        self._late: deque[tuple[float, Message]] = deque()
        self._swapped: Message | None = None

    def due(self, now: float) -> list[Message]:
        """Remove and return the late messages whose delay is over at `now` (monotonic seconds)."""
        ready = []
        while self._late and self._late[0][0] <= now:
            ready.append(self._late.popleft()[1])
        return ready

    def deliver(self, message: Message, now: float) -> list[Message]:
        """Return the messages to send now when `message` is due: none, one, or several.

        A lost or late message gives an empty list. A message that was held back to change the order
        follows the next one.
        """
        if self.strikes(FaultKind.EVENTS_LOST):
            return []
        if self.strikes(FaultKind.EVENTS_LATE):
            self._late.append((now + LATE_S, message))
            return []
        copies = [message, message] if self.strikes(FaultKind.EVENTS_DOUBLED) else [message]
        if self._swapped is not None:
            copies, self._swapped = [*copies, self._swapped], None
        elif self.strikes(FaultKind.EVENTS_REORDERED):
            copies, self._swapped = [], message
        return copies

    def clear(self) -> None:
        """Discard the KV event messages that an injected fault holds back."""
        self._late.clear()
        self._swapped = None
