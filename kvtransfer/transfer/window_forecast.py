"""Predicts in which order the windows (pieces of KV) of a transfer arrive.

Both agents compute the same plan, and windows are sent in order. A wrong prediction only costs
time: sink.py checks every window when it has arrived.
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
    """The windows (pieces of KV) of a transfer, in the order of its plan. Not thread-safe."""

    def __init__(self, transfer: int, plan: TransferPlan, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._heads = _planned(transfer, plan, window_bytes)
        self._ahead: deque[WindowHead] = deque()

    def following(
        self, head: WindowHead, tracker: ReceiveTracker, most: int, most_bytes: int
    ) -> list[tuple[WindowHead, ByteRuns]]:
        """Return at most `most` windows that follow the one with this header, and where they go.

        They belong to its layer group or the next one, and none of them has begun. All windows
        together, including the given one while it arrives, have at most `most_bytes` bytes.
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
