"""Combines changes of engines' model lists, so that routes are not rebuilt after each of them.

With many endpoints, rebuilding the routes takes milliseconds. A roll-out changes the lists of up to
a thousand engines within a short time. The first change is reported immediately, and later ones
together after a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

GAP_PER_REPORT = 10.0
"""Minimum pause after a report, as a multiple of the time that the report took.

After a report of 5 ms, the next one waits at least 50 ms. Reports therefore take at most a tenth of
the time.
"""


MAX_GAP_S = 1.0
"""Longest pause after a report: a report that waited for a reload may take a second itself."""


class ModelListNews:
    """Reports changes of engines' model lists, and combines changes that follow each other closely.

    The first change is reported immediately, by calling `report`. Changes shortly after it are
    reported together.
    """

    __slots__ = (
        "_began_at",
        "_has_news",
        "_is_held_back",
        "_next_at",
        "_report",
        "_task",
        "_timer",
    )

    def __init__(self, report: Callable[[], asyncio.Task[None] | None]) -> None:
        """Create a reporter that has no change to report yet.

        report  function that reports changes. If it returns a task, the next report waits for the
                end of that task
        """
        self._report = report
        self._next_at = self._began_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_news = self._is_held_back = False

    def on_changed(self) -> None:
        """Record a change of an engine's model list, and report it now or after the pause."""
        self._has_news = True
        if self._timer is None and self._task is None and not self._is_held_back:
            self._report_in_time()

    def _report_in_time(self) -> None:
        wait_s = self._next_at - monotonic()
        if wait_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._pass_on)
        else:
            self._pass_on()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Hold back reports during a `with` block, and report all changes together at its end.

        Await wait_until_reported() afterwards.
        """
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        self._pass_on()

    async def wait_until_reported(self) -> None:
        """Wait until the report that is in progress has ended, if there is one."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _pass_on(self) -> None:
        self._timer = None
        if self._has_news:
            self._has_news, self._began_at = False, monotonic()
            self._task = self._report()
            if self._task is None:
                self._on_reported()
            else:
                self._task.add_done_callback(self._on_task_ended)

    def _on_reported(self) -> None:
        now = monotonic()
        self._next_at = now + min(MAX_GAP_S, GAP_PER_REPORT * (now - self._began_at))

    def _on_task_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None
        self._on_reported()
        if self._has_news and not self._is_held_back:
            self._report_in_time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._is_held_back = True
