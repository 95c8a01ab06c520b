"""Frees what only replaced snapshots need, once no request uses them.

A request refers to the Snapshot with which it began until its last byte. When no reference to a
Snapshot is left, no request can pick an endpoint from it. A weak reference detects this without any
work per request.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from gateway.routes_and_snapshot import Snapshot


class SnapshotGc:
    """The replaced snapshots that requests may still use.

    Each snapshot has actions, such as closing connections. They run once no request uses it.
    """

    def __init__(self) -> None:
        self._old: list[tuple[int, ref[Snapshot]]] = []
        self._actions: list[tuple[int, Callable[[], None]]] = []

    def track(self, snapshot: Snapshot) -> None:
        """Track a snapshot that has just been replaced. No new request uses it."""
        self._old.append((snapshot.generation, ref(snapshot)))

    def when_gone(self, generation: int, action: Callable[[], None]) -> None:
        """Call `action` once no request uses a snapshot of this generation or of an earlier one."""
        self._actions.append((generation, action))

    def sweep(self) -> None:
        """Run the cleanup actions of snapshots that no request uses any more; call it regularly."""
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
