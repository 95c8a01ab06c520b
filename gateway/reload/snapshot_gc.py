"""Garbage collection of replaced snapshots: frees what only they need.

A request holds the Snapshot with which it began until its last byte. Once a Snapshot is no longer
referenced, no request can pick endpoints from it any more. A weak reference detects that, at no
cost per request.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from gateway.route import Snapshot


class SnapshotGc:
    """The snapshots that have been replaced but that requests may still use.

    Each has actions, such as closing connections, which run once no request uses the snapshot.
    """

    def __init__(self) -> None:
        self._old: list[tuple[int, ref[Snapshot]]] = []
        self._actions: list[tuple[int, Callable[[], None]]] = []

    def track(self, snapshot: Snapshot) -> None:
        """Track a snapshot that has been replaced, so that no new request begins with it."""
        self._old.append((snapshot.generation, ref(snapshot)))

    def when_gone(self, generation: int, action: Callable[[], None]) -> None:
        """Call `action` once no request uses any configuration snapshot up to this generation."""
        self._actions.append((generation, action))

    def sweep(self) -> None:
        """Run the actions of snapshots that no request uses any more. Call it regularly."""
        self._old = [
            (generation, reference)
            for generation, reference in self._old
            if reference() is not None
        ]
        actions, self._actions = self._actions, []
        oldest = self._old[0][0] if self._old else None
        due = []
        for generation, action in actions:
            if oldest is None or generation < oldest:
                due.append(action)
            else:
                self._actions.append((generation, action))
        for action in due:
            action()

    @property
    def pending_actions(self) -> int:
        return len(self._actions)
