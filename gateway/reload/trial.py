"""Whether a change made things worse, and taking it back then: `reload.auto_rollback`, off unless configured.

Lives here: the window before a change beside the window after it. What counts as failed is `is_failure`'s; a second
measure (goodput of a service class) is another field of Tally and another line in `worse`.
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
from gateway.metrics import Metrics
from gateway.reload.reloader import ChangeOptions, Reloader

log = logging.getLogger("penstock")

LOOK_S = 1.0
TRIGGER = "auto_rollback"


class Tally(msgspec.Struct, frozen=True):
    """Requests that ended since the start, and how many of them failed through no fault of the client's."""

    ended: int = 0
    failed: int = 0

    def since(self, earlier: Tally) -> Tally:
        return Tally(self.ended - earlier.ended, self.failed - earlier.failed)

    def plus(self, other: Tally) -> Tally:
        return Tally(self.ended + other.ended, self.failed + other.failed)

    @property
    def ratio(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


def is_failure(code: str, reason: str) -> bool:
    """Whether requests that ended so failed: answered with 5xx, or broken off after the first byte, a 200 by then."""
    return code.startswith("5") or (code == "200" and reason != "served")


def tallied(metrics: Metrics) -> Tally:
    """From the counters that a scrape sees."""
    ended = failed = 0
    for (_, code, reason), counter in metrics.requests_total.children():
        ended += int(counter.value)
        if is_failure(code, reason):
            failed += int(counter.value)
    return Tally(ended, failed)


def worse(before: Tally, after: Tally, limits: AutoRollback) -> str | None:
    """Why the change should go, in a sentence; None while there is no reason, or not enough requests to tell."""
    if after.ended < limits.requests or after.ratio <= before.ratio + limits.error_ratio:
        return None
    return f"{after.ratio:.1%} of {after.ended} requests failed since, {before.ratio:.1%} before"


class TrialTarget(Protocol):
    """What a change is made in: one gateway, or all workers of one."""

    @property
    def limits(self) -> AutoRollback | None:
        """None: nothing is judged."""
        ...

    @property
    def version(self) -> int: ...

    async def tally(self) -> Tally: ...

    async def roll_back(self) -> tuple[str, str]:
        """(result, message) of going back to the version before; the result is "applied" if it did."""
        ...


class GatewayOnTrial:
    """One gateway as the target of a trial."""

    def __init__(self, reloader: Reloader, metrics: Metrics) -> None:
        self._reloader = reloader
        self._metrics = metrics

    @property
    def limits(self) -> AutoRollback | None:
        return self._reloader.running.config.reload.auto_rollback

    @property
    def version(self) -> int:
        return self._reloader.version.number

    async def tally(self) -> Tally:
        return tallied(self._metrics)

    async def roll_back(self) -> tuple[str, str]:
        outcome = await self._reloader.rollback(
            None, TRIGGER, if_match=self._reloader.version.etag, options=ChangeOptions(force=True)
        )
        if outcome.result == "applied":
            self._metrics.config_reload_total.labels("rolled_back").inc()
        return outcome.result, outcome.message


class Trial:
    """Looks once a second while auto_rollback is on. A change that it made itself is not judged."""

    def __init__(self, target: TrialTarget, say: Callable[[str, bool], None]) -> None:
        self._target = target
        self._say = say
        self._past: deque[tuple[float, Tally]] = deque()
        self._swapped: tuple[float, int, Tally, Tally] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="judge changes")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def applied(self, trigger: str) -> None:
        """A configuration was put in force: its window begins, unless it is one that went back."""
        limits = self._target.limits
        if limits is None or trigger in (TRIGGER, "rollback"):
            self._swapped = None
            return
        now, tally = monotonic(), await self._target.tally()
        before = tally.since(next((each for at, each in self._past if at >= now - limits.window), tally))
        self._swapped = now, self._target.version, tally, before

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(monotonic())
            except Exception:
                log.exception("judging a change failed")

    async def look(self, now: float) -> bool:
        """Remember the tally; go back if the window of the last change says so. Whether it tried to."""
        limits = self._target.limits
        if limits is None:
            self._past.clear()
            return False
        tally = await self._target.tally()
        self._past.append((now, tally))
        while self._past[0][0] < now - limits.window:
            self._past.popleft()
        if self._swapped is None:
            return False
        at, number, then, before = self._swapped
        reason = worse(before, tally.since(then), limits) if self._target.version == number else None
        if reason is None:
            self._swapped = self._swapped if now - at < limits.window else None
            return False
        self._swapped = None
        self._say(f"v{number} made things worse: {reason}. Going back.", True)
        result, message = await self._target.roll_back()
        if result != "applied":  # nothing to go back to, or another change came first
            self._say(f"v{number} was not taken back: {message}", True)
        return True
