"""Tells those who watch, twice a second; while nobody does, only the meters are noted, every five seconds.

The notes are what lets whoever comes see the last minute at once. Lives here: when, and to how many. Not here: what is
told (view.py) and HTTP (pages.py).
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from gateway.live.marks import Mark, Marks, take
from gateway.live.view import view

if TYPE_CHECKING:
    from gateway.app import App

log = logging.getLogger("penstock")

WATCHED_S = 0.5
UNWATCHED_S = 5.0
MOST_WATCHERS = 16
FRESH_S = 0.25
MOST_OF_THE_LOOP = 0.02
"""The share of its time that the loop may spend on views. Of 64 endpoints one takes 3 ms, of 256 17 ms."""


class Hub:
    """One per gateway. `start` and `stop` it with the admin server; `frame` is the view as JSON, the same for all."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._marks = Marks()
        self._watchers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._frame = b""
        self._framed_at = float("-inf")
        self._took_s = 0.0

    def start(self) -> None:
        """Begin noting."""
        self._tick()

    def stop(self) -> None:
        """No more; whoever waits for a frame is told to go."""
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None and not self._next.done():
            self._next.cancel()

    def enter(self) -> bool:
        """Whether there is room for one who watches; leave() then ends it."""
        if self._watchers >= MOST_WATCHERS:
            return False
        self._watchers += 1
        if self._watchers == 1:
            self._tick()
        return True

    def leave(self) -> None:
        self._watchers -= 1

    def frame(self) -> bytes:
        """The view now; asked again within a quarter of a second, the one of before."""
        now = monotonic()
        if now - self._framed_at > FRESH_S:
            self._make(now)
        return self._frame

    async def following(self) -> bytes:
        """The next frame. One who is slow misses some and holds nobody up."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        every_s = max(WATCHED_S, self._took_s / MOST_OF_THE_LOOP) if self._watchers else UNWATCHED_S
        self._timer = asyncio.get_running_loop().call_later(every_s, self._tick)
        try:
            if self._watchers:
                self._make(monotonic())
                if self._next is not None and not self._next.done():
                    self._next.set_result(self._frame)
            else:
                self._marks.keep(self._note(monotonic()))
        except Exception:  # a view that fails must not end the next one
            log.exception("the live view failed")

    def _note(self, now: float) -> Mark:
        return take(self._app, now, self._marks.newest)

    def _make(self, now: float) -> None:
        mark = self._note(now)
        self._frame = msgspec.json.encode(view(self._app, self._marks, mark))
        self._framed_at = now
        self._marks.keep(mark)
        self._took_s = monotonic() - now
