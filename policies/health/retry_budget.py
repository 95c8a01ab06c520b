"""The retry budget: a limit on concurrent retries, which would otherwise overload a failing fleet.

RetryBudget decides whether one more retry may run now. filters.py chooses the endpoint of the
retry. The gateway decides whether a request may be retried at all.
"""

from __future__ import annotations

import msgspec


class RetryLimits(msgspec.Struct, frozen=True):
    """The limit of concurrent retries: `share` of the active requests, plus `floor` for an idle
    fleet.
    """

    share: float = 0.2
    floor: int = 3


class RetryBudget:
    """Counts running retries and limits their number, like Envoy's retry budget.

    The default is 20 % of active requests, at least 3. There is one budget per gateway, which may
    change its `limits`. Every successful `try_take` needs one `release` when the attempt ends.
    """

    __slots__ = ("limits", "running")

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self.running = 0

    def try_take(self, active: int) -> bool:
        """Count a retry and return True if it may start while `active` requests run.

        Returns False if it may not start.
        """
        if self.running >= self.limits.floor + self.limits.share * active:
            return False
        self.running += 1
        return True

    def release(self) -> None:
        """Count a retry as finished. Raises RuntimeError if none was running."""
        if not self.running:
            raise RuntimeError("release() was called although no retry is running")
        self.running -= 1
