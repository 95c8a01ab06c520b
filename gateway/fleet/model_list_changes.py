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


class ModelListNews:
    """Calls `report` after changes of engines' model lists.

    The first change is reported immediately. Changes shortly after it are reported together.
    """

    __slots__ = ("_has_news", "_is_held_back", "_next_at", "_report", "_timer")

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._has_news = self._is_held_back = False

    def on_changed(self) -> None:
        """Record a change of an engine's model list, and report it now or after the pause."""
        self._has_news = True
        if self._timer is not None or self._is_held_back:
            return
        wait_s = self._next_at - monotonic()
        if wait_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._pass_on)
        else:
            self._pass_on()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Hold back reports during a `with` block, and report all changes together at its end."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        self._pass_on()

    def _pass_on(self) -> None:
        self._timer = None
        if self._has_news:
            self._has_news, began = False, monotonic()
            self._report()
            self._next_at = monotonic() + GAP_PER_REPORT * (monotonic() - began)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
