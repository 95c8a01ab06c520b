"""The fleet's retry budget: retries help one request and, when everything fails, hurt all of them.

Lives here: whether one more retry may run now. Not here: which endpoint it goes to (filters.untried), or whether the
request may be retried at all (gateway/serve.py: free until the first byte).
"""

from __future__ import annotations

import msgspec


class RetryLimits(msgspec.Struct, frozen=True):
    """Concurrent retries allowed: `share` of the active requests, and `floor` more so that a quiet fleet can retry."""

    share: float = 0.2
    floor: int = 3


class RetryBudget:
    """Counts the retries now running (after Envoy's retry budget: 20 % of active requests, at least 3).

    Owned by one gateway, which may change its `limits`; every True of `try_take` is followed by one `give_back`
    when that attempt has ended.
    """

    __slots__ = ("limits", "running")

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self.running = 0

    def try_take(self, active: int) -> bool:
        """Whether one more retry may start while `active` requests are in the gateway; counts it if so."""
        if self.running >= self.limits.floor + self.limits.share * active:
            return False
        self.running += 1
        return True

    def give_back(self) -> None:
        """A retry has ended, well or badly. Raises RuntimeError if none was running."""
        if not self.running:
            raise RuntimeError("a retry was given back that had not been taken")
        self.running -= 1
