"""Arrivals: what has come of one transfer, counted in bytes per layer group, in whatever order it comes.

Not here: bytes, verdicts on them, or what happens when all are there. Pure.
"""

from __future__ import annotations

from bisect import bisect_right

from kvtransfer.lattice import Runs
from kvtransfer.reshard import Plan


class WindowError(Exception):
    """The peer announced a window that is not in the plan, not of the size it says, or that came before."""


class CameBefore(WindowError):
    """Runs of it have been begun already. What is written once is not written again, and no harm is done."""


class Arrivals:
    """Counts the windows of a plan. A window is first `begun`, when its head is read, and `landed` when all its bytes
    are in place and verified: no run is written twice, and only verified bytes count. Not thread-safe.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._missing = plan.bytes_by_group()
        self._begun: dict[tuple[int, int], _Spans] = {}
        self._under_way: dict[tuple[int, int, int, int], int] = {}
        self._groups_in_order = 0
        self.n_bytes = 0

    def begin(self, group: int, pair: int, first: int, count: int, n_bytes: int) -> Runs:
        """Where this window's bytes go. Raises WindowError: such a link is not to be trusted any further."""
        try:
            runs = self.plan.runs(group, pair).cut(first, count)
        except IndexError as wrong:
            raise WindowError(f"no such window: {wrong}") from wrong
        if runs.n_bytes != n_bytes:
            raise WindowError(f"a window of {n_bytes} bytes, by the plan it has {runs.n_bytes}")
        if not self._begun.setdefault((group, pair), _Spans()).add(first, first + count):
            raise CameBefore(
                f"runs {first} to {first + count} of group {group}, pair {pair} came before"
            )
        self._under_way[group, pair, first, count] = n_bytes
        return runs

    def land(self, group: int, pair: int, first: int, count: int) -> bool:
        """All bytes of a begun window are verified. True if its group is complete now. Raises WindowError."""
        n_bytes = self._under_way.pop((group, pair, first, count), None)
        if n_bytes is None:
            raise WindowError(
                f"runs {first} to {first + count} of group {group}, pair {pair} had not begun"
            )
        self.n_bytes += n_bytes
        self._missing[group] -= n_bytes
        while (
            self._groups_in_order < len(self._missing) and not self._missing[self._groups_in_order]
        ):
            self._groups_in_order += 1
        return not self._missing[group]

    @property
    def complete(self) -> bool:
        """Whether every byte of the plan has landed."""
        return self._groups_in_order == len(self._missing)

    @property
    def layers(self) -> int:
        """How many layers, from the first on without a gap, are complete."""
        return self.plan.layers_there(self._groups_in_order)


class _Spans:
    """Disjoint stretches of numbers, neighbours joined: one stretch as long as windows come in order."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> bool:
        """Take in [start, end); False, and nothing taken, if any of it was there."""
        at = bisect_right(self._starts, start)
        if (at and self._ends[at - 1] > start) or (
            at < len(self._starts) and self._starts[at] < end
        ):
            return False
        joins_before = at > 0 and self._ends[at - 1] == start
        joins_after = at < len(self._starts) and self._starts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        return True
