"""Whose window goes next to a peer, how much may be under way, and how fast the way has been. Pure: `now` is given.

Not here: links, plans, or choosing a peer by its bandwidth (the gateway's policies do that).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Klass(IntEnum):
    """How urgent a transfer is. A token waits for INTERACTIVE; BULK fills caches; MIGRATION empties a group."""

    INTERACTIVE = 0
    BULK = 1
    MIGRATION = 2

    @classmethod
    def named(cls, word: str) -> Klass:
        """Raises ValueError for a word that names none."""
        try:
            return cls[word.upper()]
        except KeyError:
            raise ValueError(
                f"a transfer is {', '.join(cls.__members__).lower()}, not {word!r}"
            ) from None


class Credits:
    """Bytes that may be under way to one peer: its landing windows. Taken when a window is queued, given back when it
    has landed. A window larger than the whole budget goes when nothing else is under way. Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"a peer that takes {budget_bytes} bytes takes nothing")
        self.budget_bytes = budget_bytes
        self.taken_bytes = 0
        self._of: dict[int, int] = {}

    def take(self, transfer: int, n_bytes: int) -> bool:
        """Whether `n_bytes` more may be under way; they are, if so."""
        if self.taken_bytes and self.taken_bytes + n_bytes > self.budget_bytes:
            return False
        self.taken_bytes += n_bytes
        self._of[transfer] = self._of.get(transfer, 0) + n_bytes
        return True

    def give(self, transfer: int, n_bytes: int) -> None:
        """The peer has taken in `n_bytes`. ValueError if so much was never sent to it."""
        held = self._of.get(transfer, 0)
        if not 0 <= n_bytes <= held:
            raise ValueError(f"{n_bytes} bytes given back, {held} were under way")
        self._of[transfer] = held - n_bytes
        self.taken_bytes -= n_bytes
        if held == n_bytes:
            self._of.pop(transfer, None)

    def forget(self, transfer: int) -> int:
        """The transfer is over: what it had under way is free again. Returns how much that was."""
        held = self._of.pop(transfer, 0)
        self.taken_bytes -= held
        return held


class Turn(msgspec.Struct, frozen=True):
    """One transfer that has windows to send. `deadline`, `since`: seconds on the owner's clock."""

    transfer: int
    klass: Klass
    deadline: float
    since: float


class Turns:
    """Who goes next: the most urgent class first, in it the earliest deadline, then who came first.

    For every `promote_s` that a transfer has been in line it counts as one class more urgent, so that nothing starves.
    """

    def __init__(self, promote_s: float = 0.5) -> None:
        self._promote_s = promote_s
        self._turns: dict[int, Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, transfer: int, klass: Klass, deadline: float, now: float) -> None:
        """Get in line. A transfer that is in line already keeps its place."""
        self._turns.setdefault(transfer, Turn(transfer, klass, deadline, now))

    def remove(self, transfer: int) -> None:
        """Leave the line; nothing happens if it is not there."""
        self._turns.pop(transfer, None)

    def next(self, now: float) -> int | None:
        """Whose window is to be sent; None if nobody waits. It stays in line: remove it when it has no more."""
        if not self._turns:
            return None
        return min(
            self._turns.values(),
            key=lambda turn: (self._klass(turn, now), turn.deadline, turn.since),
        ).transfer

    def _klass(self, turn: Turn, now: float) -> int:
        return max(0, turn.klass - int((now - turn.since) / self._promote_s))


class Bandwidth:
    """Bytes per second by (peer, transport), the recent counting more: weights halve with every `half_life_s` seconds
    of sending. Bytes and seconds are faded apart, so that many small transfers do not outvote a large one.
    `most`: where there are more, the one that was not used for longest is forgotten.
    """

    def __init__(self, half_life_s: float = 1.0, most: int = 1024) -> None:
        self._half_life_s, self._most = half_life_s, most
        self._faded: dict[tuple[str, str], tuple[float, float]] = {}

    def seen(self, peer: str, transport: str, n_bytes: int, seconds: float) -> None:
        """A transfer of `n_bytes` kept the way busy for `seconds`. One too short to be timed is not counted."""
        if seconds <= 0:
            return
        old_bytes, old_seconds = self._faded.pop((peer, transport), (0.0, 0.0))
        fade = 0.5 ** (seconds / self._half_life_s)
        self._faded[peer, transport] = (old_bytes * fade + n_bytes, old_seconds * fade + seconds)
        if len(self._faded) > self._most:
            del self._faded[next(iter(self._faded))]

    def bytes_per_s(self, peer: str, transport: str) -> float | None:
        """The measured rate; None where nothing has been measured."""
        faded = self._faded.get((peer, transport))
        return None if faded is None else faded[0] / faded[1]

    def all(self) -> dict[tuple[str, str], float]:
        """Every measured rate."""
        return {way: n_bytes / seconds for way, (n_bytes, seconds) in self._faded.items()}

    def forget(self, peer: str) -> None:
        """The peer is gone for good."""
        for way in [way for way in self._faded if way[0] == peer]:
            del self._faded[way]
