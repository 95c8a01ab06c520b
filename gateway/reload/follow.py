"""Follows the files that a configuration is made of: whoever edits, renames or re-links them need not tell anybody.

A stat of the few known paths five times a second, in a thread: 0.1 ms each, and a hung network disk holds nobody up. It
sees what inotify does not (network and overlay file systems), follows every link of a ConfigMap's ..data to what it
leads to, and needs no package.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gateway.config import Loaded

log = logging.getLogger("penstock")

POLL_S = 0.2

Look = tuple[int, int, int, int]
"""What changes when a file does: device and inode (another file by that name), length, time of its last change."""


class Followed(Protocol):
    """What is made of files. `running` says whether to follow them at all."""

    @property
    def paths(self) -> tuple[Path, ...]: ...

    running: Loaded

    async def changed(self) -> object:
        """One of them was touched."""
        ...


class Follow:
    """One background task. A change counts once two looks in a row agree, so a file half written is not read."""

    def __init__(self, reloader: Followed) -> None:
        self._reloader = reloader
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin. The first look counts as a change: what was edited since the files were read is not missed."""
        first = await _looks(self._reloader.paths)
        self._task = asyncio.create_task(self._run(first), name="follow the configuration")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, last: dict[Path, Look | None]) -> None:
        known: dict[Path, Look | None] | None = None
        while True:
            await asyncio.sleep(POLL_S)
            now = await _looks(self._reloader.paths)
            settled = now == last
            last = now
            if settled and now != known and self._reloader.running.config.reload.watch:
                known = now
                try:
                    await self._reloader.changed()
                except Exception:
                    log.exception("following the configuration failed")


async def _looks(paths: Iterable[Path]) -> dict[Path, Look | None]:
    return await asyncio.to_thread(lambda: {path: _look(path) for path in paths})


def _look(path: Path) -> Look | None:
    """None: there is no such file, nobody may look at it, or no file can be called so."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
