"""A map of limited size whose entries expire. The caller passes the time."""

from __future__ import annotations

from typing import Generic, TypeVar

_MOST = 4096

T = TypeVar("T")


class TtlMap(Generic[T]):
    """A map whose values expire `ttl_s` seconds after they were set.

    It holds at most `max_entries` values; above that, the oldest is dropped. Not thread-safe.
    """

    def __init__(self, ttl_s: float, max_entries: int = _MOST) -> None:
        self._keep_s, self._most = ttl_s, max_entries
        self._entries: dict[str, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: str, value: T, now: float) -> None:
        """Set the value of `name` in the map. It expires `ttl_s` seconds from now."""
        self._entries.pop(name, None)
        self._entries[name] = (now + self._keep_s, value)
        while len(self._entries) > self._most or next(iter(self._entries.values()))[0] <= now:
            del self._entries[next(iter(self._entries))]
            if not self._entries:
                break

    def get(self, name: str, now: float) -> T | None:
        """Return the value of `name`, or None if there is none or it has expired."""
        expires, value = self._entries.get(name, (now, None))
        return value if now < expires else None

    def pop(self, name: str, now: float) -> T | None:
        """Remove `name` and return its value, or None if there is none or it has expired."""
        value = self.get(name, now)
        self._entries.pop(name, None)
        return value
