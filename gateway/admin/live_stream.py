"""Tells those who watch, twice a second; while nobody does, only the meters are noted, every five seconds.

The notes are what lets whoever comes see the last minute at once. Lives here: when, and to how many. Not here: what is
told (gateway/admin/live_view.py), of whom (one gateway, or several workers) and HTTP (gateway/admin/live_pages.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

import msgspec

from gateway.admin.fleet_status import Standing
from gateway.admin.live_view import view
from gateway.admin.metric_samples import Mark, Marks

log = logging.getLogger("penstock")

WATCHED_S = 0.5
UNWATCHED_S = 5.0
MOST_WATCHERS = 16
FRESH_S = 0.25
MOST_OF_THE_LOOP = 0.02
"""The share of its time that the loop may spend on views. Of 64 endpoints one takes 3 ms, of 256 17 ms."""

Look = Callable[[Mark | None], Awaitable[tuple[Mark, Standing]]]
"""A note of the meters, given the one before, and how things stand. Raises LookupError when nobody can say."""


class Hub:
    """One per admin server. `start` and `stop` it with that; `frame` is the view as JSON, the same for all."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._marks = Marks()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._watched = asyncio.Event()
        self._next: asyncio.Future[bytes] | None = None
        self._frame = b""
        self._framed_at = float("-inf")
        self._took_s = 0.0

    def start(self) -> None:
        """Begin noting."""
        self._task = asyncio.create_task(self._beat(), name="note the meters")

    def stop(self) -> None:
        """No more; whoever waits for a frame is told to go."""
        if self._task is not None:
            self._task.cancel()
        if self._next is not None and not self._next.done():
            self._next.cancel()

    def enter(self) -> bool:
        """Whether there is room for one who watches; leave() then ends it."""
        if self._watchers >= MOST_WATCHERS:
            return False
        self._watchers += 1
        self._watched.set()
        return True

    def leave(self) -> None:
        self._watchers -= 1

    async def frame(self) -> bytes:
        """The view now; asked again within a quarter of a second, the one of before. Raises LookupError."""
        if monotonic() - self._framed_at > FRESH_S:
            await self._make()
        return self._frame

    async def following(self) -> bytes:
        """The next frame. One who is slow misses some and holds nobody up."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    async def _beat(self) -> None:
        while True:
            try:
                await self._turn()
            except LookupError:
                pass  # the next may find somebody
            except Exception:  # a view that fails must not end the next one
                log.exception("the live view failed")
            every_s = max(WATCHED_S, self._took_s / MOST_OF_THE_LOOP) if self._watchers else UNWATCHED_S
            self._watched.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._watched.wait()

    async def _turn(self) -> None:
        if not self._watchers:
            mark, _ = await self._look(self._marks.newest)
            self._marks.keep(mark)
            return
        await self._make()
        if self._next is not None and not self._next.done():
            self._next.set_result(self._frame)

    async def _make(self) -> None:
        began = monotonic()
        mark, standing = await self._look(self._marks.newest)
        self._frame = msgspec.json.encode(view(standing, self._marks, mark))
        self._framed_at = mark.at
        self._marks.keep(mark)
        self._took_s = monotonic() - began
