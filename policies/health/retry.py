"""The retry budget: retries help single requests, but overload the fleet when everything fails.

Decides whether one more retry may run now. Which endpoint it uses is in filters.py; whether a
request may be retried at all is the gateway's decision.
"""

from __future__ import annotations

import msgspec


class RetryLimits(msgspec.Struct, frozen=True):
    """Allowed concurrent retries: `share` of the active requests plus `floor`, so that an idle
    fleet can retry.
    """

    share: float = 0.2
    floor: int = 3


class RetryBudget:
    """Counts running retries (after Envoy's retry budget: 20 % of active requests, at least 3).

    One per gateway, which may change its `limits`. Every successful `try_take` needs one
    `release` when the attempt ends.
    """

    __slots__ = ("limits", "running")

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self.running = 0

    def try_take(self, active: int) -> bool:
        """Return whether a retry may start while `active` requests are in the gateway, and count it
        if so.
        """
        if self.running >= self.limits.floor + self.limits.share * active:
            return False
        self.running += 1
        return True

    def release(self) -> None:
        """Count a finished retry. Raises RuntimeError if none was running."""
        if not self.running:
            raise RuntimeError("give_back() without a running retry")
        self.running -= 1
