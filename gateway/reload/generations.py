"""When a replaced snapshot is really gone: what it may still need is given up then, and not before.

A request holds the Snapshot it began with to its last byte, so a Snapshot that nobody holds any more is one that no
request can pick from. Asking for that costs a request nothing: a weak reference answers it.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from gateway.route import Snapshot


class Generations:
    """Old snapshots that may still be in use, and what is due once they are not. Swept with everything else."""

    def __init__(self) -> None:
        self._old: list[tuple[int, ref[Snapshot]]] = []
        self._due: list[tuple[int, Callable[[], None]]] = []

    def replaced(self, snapshot: Snapshot) -> None:
        """No new request begins with it."""
        self._old.append((snapshot.generation, ref(snapshot)))

    def when_gone(self, generation: int, act: Callable[[], None]) -> None:
        """Call `act` once nobody holds a snapshot of this generation or an older one."""
        self._due.append((generation, act))

    def sweep(self) -> None:
        self._old = [(generation, held) for generation, held in self._old if held() is not None]
        oldest = self._old[0][0] if self._old else None
        ready = [act for generation, act in self._due if oldest is None or generation < oldest]
        self._due = [(generation, act) for generation, act in self._due if oldest is not None and generation >= oldest]
        for act in ready:
            act()

    @property
    def waiting(self) -> int:
        """Things still kept for old snapshots."""
        return len(self._due)
