"""Predicts which bytes of a KV transfer arrive next, so that C code can receive them in one call.

KV is sent in windows, units of some byte ranges. Both agents compute the same plan, and windows are
sent in its order. A wrong prediction only costs time: sink.py checks every window when it has
arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.transfer_plan import TransferPlan
from kvtransfer.transfer.receive_tracker import ReceiveTracker
from kvtransfer.transport_interface import WindowHead

_MOST_SKIPPED = 64  # windows that may be missing before a forecast is given up


class WindowForecast:
    """The order in which the units (windows) of one KV transfer should arrive. Not thread-safe."""

    def __init__(self, transfer: int, plan: TransferPlan, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._heads = _planned(transfer, plan, window_bytes)
        self._ahead: deque[WindowHead] = deque()

    def following(
        self, head: WindowHead, tracker: ReceiveTracker, most: int, most_bytes: int
    ) -> list[tuple[WindowHead, ByteRuns]]:
        """Return the windows (units of KV) that should follow a given one, and where they go.

        head        header of the given window
        tracker     which bytes have arrived
        most        maximum number of windows to return
        most_bytes  maximum bytes of all windows, including the given one while it arrives

        All are in the group of layers of the given window or in the next group. None has begun.
        """
        windows: list[tuple[WindowHead, ByteRuns]] = []
        is_arriving = tracker.is_arriving(head.group, head.pair, head.first, head.count)
        left = most_bytes - (head.n_bytes if is_arriving else 0)
        for after in self._behind(head):
            left -= after.n_bytes
            if left < 0 or after.group > head.group + 1 or len(windows) == most:
                break
            runs = tracker.peek(after.group, after.pair, after.first, after.count)
            if runs is None:
                break
            windows.append((after, runs))
        return windows

    def _behind(self, head: WindowHead) -> Iterator[WindowHead]:
        # Yield the windows behind this one, or nothing if it is not expected.
        for _ in range(_MOST_SKIPPED):
            if not self._ahead and not self._look():
                return
            if self._ahead[0] == head:
                break
            self._ahead.popleft()
        else:
            self._heads = iter(())
            return
        index = 1
        while index < len(self._ahead) or self._look():
            yield self._ahead[index]
            index += 1

    def _look(self) -> bool:
        head = next(self._heads, None)
        if head is not None:
            self._ahead.append(head)
        return head is not None


def _planned(transfer: int, plan: TransferPlan, window_bytes: int) -> Iterator[WindowHead]:
    for group in range(plan.groups):
        for window in plan.windows(group, window_bytes):
            yield WindowHead(transfer, group, *window)
