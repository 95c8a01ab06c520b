"""How a gateway that has just come gets warm: it asks, is told by whoever lives longest, and then takes what it heard
meanwhile. Sans-IO: times come in, what to say comes out.
"""

from __future__ import annotations

from enum import StrEnum

PATIENCE_S = 0.5
"""For the first part of an answer, and between two parts."""

ATTEMPTS = 4
HELD_CAP_BYTES = 8 << 20


class State(StrEnum):
    """AWAY: no bus yet. ASKING: hello was said. TOLD: parts come in. WARM: what others know is known."""

    AWAY = "away"
    ASKING = "asking"
    TOLD = "told"
    WARM = "warm"


class Warming:
    """One gateway's way to WARM. `warm`: it was there once. `told` counts messages of others' snapshots; `took_s`: from
    the first hello to WARM.

    What others say meanwhile is held: an index ages by the order in which it hears of prompts.
    """

    __slots__ = ("_attempt", "_due", "_held", "_held_bytes", "asked_at", "state", "told", "took_s", "warm")

    def __init__(self, now: float) -> None:
        self.state = State.AWAY
        self.warm = False
        self.asked_at = now
        self.told = 0
        self.took_s = 0.0
        self._attempt = 0
        self._due = 0.0
        self._held: list[tuple[bytes, bool]] = []
        self._held_bytes = 0

    def ask(self, now: float, *, alone: bool) -> int | None:
        """The number of the attempt if hello is to be said now. `alone`: nobody was heard who could tell us."""
        if self.state is State.WARM or (self.state is not State.AWAY and now < self._due):
            return None
        if self.state is State.AWAY:
            self.state, self._attempt, self.asked_at = State.ASKING, 0, now
        else:
            self._attempt += 1
            if self._attempt >= ATTEMPTS or alone:
                return None  # there is nobody to be told by: `finished` says so
            self.state = State.ASKING
        self._due = now + PATIENCE_S
        return self._attempt

    def again(self) -> None:
        """Something was missed: ask once more. Who was warm once stays so meanwhile."""
        if self.state is State.WARM:
            self.state = State.AWAY

    def hold(self, body: bytes, age_s: float, now: float) -> None:
        """Keep something said by all for later."""
        self._held.append((body, now - age_s >= self.asked_at))
        self._held_bytes += len(body)
        while self._held_bytes > HELD_CAP_BYTES:
            self._held_bytes -= len(self._held.pop(0)[0])

    def part(self, count: int, *, last: bool, now: float) -> None:
        """A part of an answer came, with so many messages."""
        if self.state in (State.ASKING, State.TOLD):
            self.told += count
            self._due = now + PATIENCE_S
            self.state = State.TOLD
            if last:
                self._due = now
                self._attempt = ATTEMPTS

    def finished(self, now: float) -> list[bytes] | None:
        """What was held, to be taken now, when there is nothing more to wait for; None while there is.

        One who was told leaves out what was said before it asked: that was in the answer.
        """
        if self.state is State.WARM or self.state is State.AWAY or now < self._due:
            return None
        self.state, self.warm = State.WARM, True
        self.took_s = now - self.asked_at
        held = [body for body, fresh in self._held if fresh or not self.told]
        self._held, self._held_bytes = [], 0
        return held
