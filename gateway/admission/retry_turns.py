"""Retries within the gateway's retry budget: a retry beyond the budget waits for its turn.

policies/health/retry_budget.py computes how many retries may run at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import ceil

from gateway.http.eager_task import timeout_after
from policies.health.retry_budget import RetryBudget, RetryLimits

RETRY_WAIT_S = 5.0
"""Maximum seconds that a retry waits for its turn; then its request fails."""


class RetryTurns:
    """Limits how many retries run at once in this gateway; further retries wait for their turn.

    is_stopping  whether all retries are refused, because the gateway is shutting down
    """

    __slots__ = ("_active_requests", "_budget", "_waiters", "is_stopping")

    def __init__(self, active_requests: Callable[[], int]) -> None:
        """Prepare to grant retries; none runs yet.

        active_requests  function that returns the number of running requests, from which the budget
                         is computed
        """
        self._active_requests = active_requests
        self._budget = RetryBudget(RetryLimits())
        self._waiters: deque[asyncio.Future[bool]] = deque()
        self.is_stopping = False

    def configure(self, limits: RetryLimits) -> None:
        """Apply the limits of a new configuration. Retries that run now continue."""
        self._budget.limits = limits

    async def acquire(self) -> bool:
        """Take one retry from the gateway's retry budget; return whether one became available.

        If the budget is used up, wait up to RETRY_WAIT_S seconds: this spreads the retries of a
        failed endpoint over time. End the retry with release().
        """
        if self.is_stopping:
            return False
        if self.try_acquire():
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            async with timeout_after(RETRY_WAIT_S):
                await turn
        except TimeoutError:
            # The turn may have been granted in the moment of the timeout.
            return turn.done() and not turn.cancelled() and turn.result()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release()
            raise
        finally:
            if turn in self._waiters:
                self._waiters.remove(turn)
        return turn.result()

    def try_acquire(self) -> bool:
        """Take one retry from the retry budget, without waiting; return False if it is used up."""
        return self._budget.try_take(self._active_requests())

    def release(self) -> None:
        """Return one retry to the budget, and grant waiting retries that now fit."""
        self._budget.release()
        while self._waiters and self._budget.try_take(self._active_requests()):
            self._grant_next()

    def _grant_next(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._budget.release()

    def stop(self) -> None:
        """Refuse all waiting and future retries, because the gateway is shutting down."""
        self.is_stopping = True
        for turn in self._waiters:
            if not turn.done():
                turn.set_result(False)

    @property
    def running(self) -> int:
        return self._budget.running

    @property
    def left(self) -> int | None:
        """Return how many retries could begin now without waiting; None if retries are off."""
        limits = self._budget.limits
        if not limits.floor and not limits.share:
            return None
        allowed = ceil(limits.floor + limits.share * self._active_requests())
        return max(0, allowed - self._budget.running)
