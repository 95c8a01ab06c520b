"""Auto-rollback: reverts a configuration change if more requests fail after it than before.

It is off unless `reload.auto_rollback` is set. It compares the time after the change with an
equally long time before it. To judge changes by another measure too, add a field to FailureCount
and a condition to regression().
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol

import msgspec

from gateway.config import AutoRollback
from gateway.metrics.catalogue import Metrics
from gateway.reload.reloader import ChangeOptions, Reloader

log = logging.getLogger("penstock")

CHECK_S = 1.0
TRIGGER = "auto_rollback"


class FailureCount(msgspec.Struct, frozen=True):
    """Counts of requests since the start of the process, or since an earlier count.

    ended   number of requests that have ended
    failed  number of those that failed through no fault of their clients (see is_failure)
    """

    ended: int = 0
    failed: int = 0

    def since(self, earlier: FailureCount) -> FailureCount:
        return FailureCount(self.ended - earlier.ended, self.failed - earlier.failed)

    def plus(self, other: FailureCount) -> FailureCount:
        return FailureCount(self.ended + other.ended, self.failed + other.failed)

    @property
    def ratio(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


def is_failure(code: str, reason: str) -> bool:
    """Return whether a request failed: with status 5xx, or as a 200 whose answer broke off.

    `code` is the HTTP status. `reason` is "served", or the cause of a failure.
    """
    return code.startswith("5") or (code == "200" and reason != "served")


def count_failures(metrics: Metrics) -> FailureCount:
    """Return how many requests have ended and failed since the start of the process."""
    ended = failed = 0
    for (_, code, reason), counter in metrics.requests_total.children():
        ended += int(counter.value)
        if is_failure(code, reason):
            failed += int(counter.value)
    return FailureCount(ended, failed)


def regression(before: FailureCount, after: FailureCount, limits: AutoRollback) -> str | None:
    """Return why a configuration change should be reverted, or None if it should not.

    before  counts of an equally long time before the change
    after   counts since the change; with too few ended requests, the result is None
    limits  the settings of auto-rollback
    """
    if after.ended < limits.requests or after.ratio <= before.ratio + limits.error_ratio:
        return None
    return f"{after.ratio:.1%} of {after.ended} requests failed since, {before.ratio:.1%} before"


class RollbackTarget(Protocol):
    """The interface through which auto-rollback counts failures and reverts a change.

    One class implements it for a single gateway process, another one for all workers together.
    """

    @property
    def limits(self) -> AutoRollback | None:
        """Return the settings of auto-rollback, or None if it is off."""
        ...

    @property
    def version(self) -> int: ...

    async def failure_count(self) -> FailureCount: ...

    async def roll_back(self) -> tuple[str, str]:
        """Apply the previous configuration version again.

        Returns (result, message): the result is "applied" on success, else for example "rejected";
        the message says what happened, for the operator.
        """
        ...


class GatewayRollbackTarget:
    """Lets auto-rollback count failures and undo changes in a gateway that is a single process."""

    def __init__(self, reloader: Reloader, metrics: Metrics) -> None:
        self._reloader = reloader
        self._metrics = metrics

    @property
    def limits(self) -> AutoRollback | None:
        return self._reloader.running.config.reload.auto_rollback

    @property
    def version(self) -> int:
        return self._reloader.version.number

    async def failure_count(self) -> FailureCount:
        return count_failures(self._metrics)

    async def roll_back(self) -> tuple[str, str]:
        outcome = await self._reloader.rollback(
            None, TRIGGER, if_match=self._reloader.version.etag, options=ChangeOptions(force=True)
        )
        if outcome.result == "applied":
            self._metrics.config_reload_total.labels("rolled_back").inc()
        return outcome.result, outcome.message


class _Change(msgspec.Struct, frozen=True):
    # The change under observation, with the counts when it was applied and those before it.

    applied_at: float
    version: int
    count: FailureCount
    before: FailureCount


class AutoRollbackMonitor:
    """Checks once a second whether the last configuration change should be reverted.

    It does so only while auto-rollback is on, and does not check changes that are rollbacks.
    """

    def __init__(self, target: RollbackTarget, report_line: Callable[[str, bool], None]) -> None:
        # Initialize for one target; `say(line, is_bad)` reports a line to the operator.
        self._target = target
        self._report = report_line
        self._counts: deque[tuple[float, FailureCount]] = deque()
        self._change: _Change | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="auto-rollback")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def on_applied(self, trigger: str) -> None:
        """Start to observe an applied configuration change, unless the change is a rollback."""
        limits = self._target.limits
        if limits is None or trigger in (TRIGGER, "rollback"):
            self._change = None
            return
        now, count = monotonic(), await self._target.failure_count()
        window_start = now - limits.window
        first = next((past for at, past in self._counts if at >= window_start), count)
        self._change = _Change(now, self._target.version, count, count.since(first))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.check(monotonic())
            except Exception:
                log.exception("auto-rollback: checking a configuration change failed")

    async def check(self, now: float) -> bool:
        """Count requests, and revert the last change if more of them fail since it was applied.

        Returns whether a rollback was attempted.
        """
        limits = self._target.limits
        if limits is None:
            self._counts.clear()
            return False
        count = await self._target.failure_count()
        self._counts.append((now, count))
        while self._counts[0][0] < now - limits.window:
            self._counts.popleft()
        change = self._change
        if change is None:
            return False
        reason = None
        if self._target.version == change.version:
            reason = regression(change.before, count.since(change.count), limits)
        if reason is None:
            if now - change.applied_at >= limits.window:
                self._change = None
            return False
        self._change = None
        self._report(f"v{change.version} increased failures: {reason}. Rolling back.", True)
        result, message = await self._target.roll_back()
        if result != "applied":  # no older version exists, or another change came first
            self._report(f"v{change.version} was not rolled back: {message}", True)
        return True
