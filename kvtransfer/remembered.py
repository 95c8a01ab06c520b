"""Remembered: names of which something was said lately, so that who comes too late is not left to wait.

Not here: what is said of whom (source.py). Pure: `now` is given, and never goes back.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_MOST = 4096

T = TypeVar("T")


class Remembered(Generic[T]):
    """Each name for `keep_s`, and no more than `most` of them: the oldest is forgotten first. Not thread-safe."""

    def __init__(self, keep_s: float, most: int = _MOST) -> None:
        self._keep_s, self._most = keep_s, most
        self._said: dict[str, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._said)

    def put(self, name: str, what: T, now: float) -> None:
        """The latest word on a name."""
        self._said.pop(name, None)
        self._said[name] = (now + self._keep_s, what)
        while len(self._said) > self._most or next(iter(self._said.values()))[0] <= now:
            del self._said[next(iter(self._said))]
            if not self._said:
                break

    def look(self, name: str, now: float) -> T | None:
        """What was said of it; None if nothing was, or too long ago."""
        until, what = self._said.get(name, (now, None))
        return what if now < until else None

    def take(self, name: str, now: float) -> T | None:
        """The same, and it is forgotten."""
        what = self.look(name, now)
        self._said.pop(name, None)
        return what
