"""Records which bytes of one KV transfer have arrived, in any order, and which layers are complete.

It neither stores nor verifies the bytes.
"""

from __future__ import annotations

from bisect import bisect_right

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.transfer_plan import TransferPlan


class WindowError(Exception):
    """Raised for received KV that is not planned, has a wrong size, or has arrived before."""


class RepeatedWindowError(WindowError):
    """Raised for received KV of which a part has arrived before.

    It is not written again, and the connection may continue.
    """


class ReceiveTracker:
    """Records which bytes of one KV transfer have arrived. Not thread-safe.

    KV arrives in windows, units of some byte ranges each. A window has begun when its header is
    read. It has landed when its bytes are written to their blocks and verified. No byte range is
    written twice, and only verified bytes count.

    In the methods, a window is named by its group of layers, its pair of ranks, and the number
    `first` and count of its byte ranges in the plan.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._missing = plan.bytes_by_group()
        self._begun_runs: dict[tuple[int, int], _Spans] = {}
        self._unverified: dict[tuple[int, int, int, int], int] = {}
        self._groups_in_order = 0
        self.n_bytes = 0

    def begin(self, group: int, pair: int, first: int, count: int, n_bytes: int) -> ByteRuns:
        """Record that a window (unit of KV) begins to arrive; return where to write its bytes.

        Raises WindowError if it is not planned; the connection must then be closed.
        """
        try:
            runs = self.plan.runs(group, pair).cut(first, count)
        except IndexError as error:
            raise WindowError(
                f"a received window (piece of KV) is not in the transfer's plan: {error}"
            ) from error
        if runs.n_bytes != n_bytes:
            raise WindowError(
                f"a received window (piece of KV) has {n_bytes} bytes, but {runs.n_bytes} "
                "bytes are planned"
            )
        if not self._begun_runs.setdefault((group, pair), _Spans()).add(first, first + count):
            raise RepeatedWindowError(
                f"the byte ranges {first} to {first + count} of layer group {group}, rank "
                f"pair {pair}, have arrived before"
            )
        self._unverified[group, pair, first, count] = n_bytes
        return runs

    def peek(self, group: int, pair: int, first: int, count: int) -> ByteRuns | None:
        """Return where the bytes of a window (unit of KV) would be written if it arrived now.

        Returns None if any part of it has arrived. Raises IndexError if it is not planned.
        """
        begun = self._begun_runs.get((group, pair))
        if begun is not None and begun.overlaps(first, first + count):
            return None
        return self.plan.runs(group, pair).cut(first, count)

    def is_arriving(self, group: int, pair: int, first: int, count: int) -> bool:
        """Return whether a unit of KV (window) has begun to arrive, but is not verified yet."""
        return (group, pair, first, count) in self._unverified

    def mark_verified(self, group: int, pair: int, first: int, count: int) -> bool:
        """Record that a window has arrived intact; return whether its group of layers is complete.

        Raises WindowError if the window was not begun.
        """
        n_bytes = self._unverified.pop((group, pair, first, count), None)
        if n_bytes is None:
            raise WindowError(
                f"the byte ranges {first} to {first + count} of layer group {group}, rank "
                f"pair {pair}, were not begun"
            )
        self.n_bytes += n_bytes
        self._missing[group] -= n_bytes
        while (
            self._groups_in_order < len(self._missing) and not self._missing[self._groups_in_order]
        ):
            self._groups_in_order += 1
        return not self._missing[group]

    @property
    def is_complete(self) -> bool:
        """Return whether every byte of the transfer has arrived and is verified."""
        return self._groups_in_order == len(self._missing)

    @property
    def complete_layers(self) -> int:
        """Return the number of layers, from layer 0 on, that have arrived and are verified."""
        return self.plan.complete_layers(self._groups_in_order)


class _Spans:
    # A set of disjoint number ranges.
    #
    # Adjacent ranges are joined, so windows in order make one range.

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def overlaps(self, start: int, end: int) -> bool:
        index = bisect_right(self._starts, start)
        return (index > 0 and self._ends[index - 1] > start) or (
            index < len(self._starts) and self._starts[index] < end
        )

    def add(self, start: int, end: int) -> bool:
        # Add [start, end) and return True.
        #
        # Add nothing and return False if any part of it is present.
        if self.overlaps(start, end):
            return False
        index = bisect_right(self._starts, start)
        joins_previous = index > 0 and self._ends[index - 1] == start
        joins_next = index < len(self._starts) and self._starts[index] == end
        if joins_previous and joins_next:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_previous:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        return True
