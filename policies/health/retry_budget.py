"""The retry budget: a limit on concurrent retries, so that they do not overload a failing fleet.

RetryBudget decides whether one more retry may run now. filters.py chooses the endpoint of the
retry. The gateway decides whether a request may be retried at all.
"""

from __future__ import annotations

import msgspec


class RetryLimits(msgspec.Struct, frozen=True):
    """How many retries may run at once: `floor` plus the fraction `share` of active requests."""

    share: float = 0.2
    floor: int = 3


class RetryBudget:
    """Counts running retries and limits their number, like Envoy's retry budget.

    The default limit is 3 plus 20 % of the active requests. A gateway has one budget, and may
    change its `limits`. After every successful `try_take`, call `release` when the retry ends.
    """

    __slots__ = ("limits", "running")

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self.running = 0

    def try_take(self, active: int) -> bool:
        """Take one retry from the budget; return False if no retry may start now.

        `active` is the number of running requests.
        """
        if self.running >= self.limits.floor + self.limits.share * active:
            return False
        self.running += 1
        return True

    def release(self) -> None:
        """Count a retry as ended. Raises RuntimeError if no retry is running."""
        if not self.running:
            raise RuntimeError(
                "release() was called more often than retries were begun: no retry is running"
            )
        self.running -= 1
