"""The warm-up of a new gateway: it requests the state of another gateway, and applies it. No I/O.

Of the other gateways, the one that started first answers. The caller passes in the time and sends
the messages.
"""

from __future__ import annotations

from enum import StrEnum

PART_TIMEOUT_S = 0.5
"""Maximum seconds until the first part of an answer, and between two parts."""

ATTEMPTS = 4
BUFFER_CAP_BYTES = 8 << 20


class WarmUpState(StrEnum):
    """The phases of a warm-up: not connected, state requested (Hello), receiving state, warm."""

    DISCONNECTED = "away"
    ASKING = "asking"
    RECEIVING = "told"
    WARM = "warm"


class WarmUp:
    """The transfer of another gateway's state to this one, which has just started.

    is_warm            whether a warm-up has been completed; a repeated one does not reset it
    received_messages  number of messages in the answer of the other gateway
    took_s             seconds from the first request (Hello) to the end of the warm-up

    The prefix index assumes that it learns of prompts in the order in which they were sent.
    Messages that arrive during the warm-up are newer than the transferred state. Therefore they are
    buffered until the transfer is complete.
    """

    __slots__ = (
        *(
            "_attempt",
            "_buffer",
            "_buffer_bytes",
            "_deadline",
            "started_at",
            "state",
            "received_messages",
        ),
        *("took_s", "is_warm"),
    )

    def __init__(self, now: float) -> None:
        self.state = WarmUpState.DISCONNECTED
        self.is_warm = False
        self.started_at = now
        self.received_messages = 0
        self.took_s = 0.0
        self._attempt = 0
        self._deadline = 0.0
        self._buffer: list[tuple[bytes, bool]] = []
        self._buffer_bytes = 0

    def next_hello(self, now: float, *, has_no_peers: bool) -> int | None:
        """Return the number of the Hello message that must be sent now; None if none is due.

        A Hello asks the other gateways for their state. Its number counts attempts, from 0.

        has_no_peers  whether no other gateway is known that could answer
        """
        if self.state is WarmUpState.WARM or (
            self.state is not WarmUpState.DISCONNECTED and now < self._deadline
        ):
            return None
        if self.state is WarmUpState.DISCONNECTED:
            self.state, self._attempt, self.started_at = WarmUpState.ASKING, 0, now
        else:
            self._attempt += 1
            if self._attempt >= ATTEMPTS or has_no_peers:
                return None  # no gateway can answer: finish() ends the warm-up
            self.state = WarmUpState.ASKING
        self._deadline = now + PART_TIMEOUT_S
        return self._attempt

    def restart(self) -> None:
        """Request the state of another gateway again, because frames were lost.

        `is_warm` does not change.
        """
        if self.state is WarmUpState.WARM:
            self.state = WarmUpState.DISCONNECTED

    def buffer(self, body: bytes, age_s: float, now: float) -> None:
        """Buffer a message of another gateway until the warm-up has ended.

        age_s  seconds since it was sent
        """
        self._buffer.append((body, now - age_s >= self.started_at))
        self._buffer_bytes += len(body)
        while self._buffer_bytes > BUFFER_CAP_BYTES:
            self._buffer_bytes -= len(self._buffer.pop(0)[0])

    def on_part(self, count: int, *, is_last: bool, now: float) -> None:
        """Record that a part of the other gateway's state has arrived.

        count    number of messages in the part
        is_last  whether the state is complete now
        now      monotonic seconds
        """
        if self.state in (WarmUpState.ASKING, WarmUpState.RECEIVING):
            self.received_messages += count
            self._deadline = now + PART_TIMEOUT_S
            self.state = WarmUpState.RECEIVING
            if is_last:
                self._deadline = now
                self._attempt = ATTEMPTS

    def finish(self, now: float) -> list[bytes] | None:
        """Return the buffered messages to apply if the warm-up is over, else None.

        If another gateway has answered, messages that it sent before the Hello are left out,
        because its answer contains them.
        """
        if (
            self.state is WarmUpState.WARM
            or self.state is WarmUpState.DISCONNECTED
            or now < self._deadline
        ):
            return None
        self.state, self.is_warm = WarmUpState.WARM, True
        self.took_s = now - self.started_at
        bodies = [body for body, is_newer in self._buffer if is_newer or not self.received_messages]
        self._buffer, self._buffer_bytes = [], 0
        return bodies
