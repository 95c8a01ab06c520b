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
    """Knows which replaced configuration snapshots running requests may still use.

    Actions, such as closing connections, can be registered for a snapshot. They run once no request
    uses it.
    """

    def __init__(self) -> None:
        self._old: list[tuple[int, ref[Snapshot]]] = []
        self._actions: list[tuple[int, Callable[[], None]]] = []

    def track(self, snapshot: Snapshot) -> None:
        """Track a snapshot that has just been replaced. No new request uses it."""
        self._old.append((snapshot.generation, ref(snapshot)))

    def when_gone(self, generation: int, action: Callable[[], None]) -> None:
        """Let take_due() return `action` once no request uses this generation or an earlier one."""
        self._actions.append((generation, action))

    def take_due(self) -> list[Callable[[], None]]:
        """Return the cleanup actions of snapshots that no request uses any more, and forget them.

        The caller must run them.
        """
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
        return due

    @property
    def pending_actions(self) -> int:
        return len(self._actions)
