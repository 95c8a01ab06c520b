"""Watches the files of a configuration and triggers a reload when they change.

A thread polls the paths with stat() five times a second, so that a hung network disk blocks no
request. Unlike inotify, polling works on network and overlay file systems. It also follows symbolic
links, which Kubernetes replaces when a ConfigMap changes (..data).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gateway.config import LoadedConfig

log = logging.getLogger("penstock")

POLL_S = 0.2

FileState = tuple[int, int, int, int, int]
"""A value that changes when the file does: device, inode, length, and the times in nanoseconds of
the last change of its content and of its owner or permissions.
"""


class WatchedConfig(Protocol):
    """The interface of a configuration loaded from files that are watched for changes.

    `running` is the current configuration, whose settings may turn watching off.
    """

    @property
    def paths(self) -> tuple[Path, ...]: ...

    running: LoadedConfig

    async def reload_changed_files(self) -> object:
        """Reload the configuration, because one of its files has changed."""
        ...


class FileWatcher:
    """A background task that polls the files of a configuration.

    A change triggers a reload after two polls in a row have seen it, so that no half-written file
    is read.
    """

    def __init__(self, reloader: WatchedConfig) -> None:
        self._reloader = reloader
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start watching the configuration's files.

        The first poll counts as a change, so an edit since the files were loaded is not missed.
        """
        first = await _stat_all(self._reloader.paths)
        self._task = asyncio.create_task(self._run(first), name="watch the configuration")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, last: dict[Path, FileState | None]) -> None:
        handled: dict[Path, FileState | None] | None = None
        while True:
            await asyncio.sleep(POLL_S)
            now = await _stat_all(self._reloader.paths)
            is_settled = now == last
            last = now
            is_new = now != handled
            if is_settled and is_new and self._reloader.running.config.reload.watch:
                handled = now
                try:
                    await self._reloader.reload_changed_files()
                except Exception:
                    log.exception("reloading the configuration after a change of its file failed")


async def _stat_all(paths: Iterable[Path]) -> dict[Path, FileState | None]:
    return await asyncio.to_thread(lambda: {path: _stat(path) for path in paths})


def _stat(path: Path) -> FileState | None:
    # Return the file's state, or None if it cannot be read or the path is invalid.
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
