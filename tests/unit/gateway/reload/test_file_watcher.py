"""Tests of watching a configuration's files for changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.reload import file_watcher
from gateway.reload.file_watcher import FileWatcher
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


class Reloads:
    """A watched configuration file, with the number of reloads that its changes have caused."""

    def __init__(self, path: Path) -> None:
        self.paths = (path,)
        self.running = SimpleNamespace(config=SimpleNamespace(reload=SimpleNamespace(watch=True)))
        self.count = 0
        self.reloaded = asyncio.Event()

    async def reload_changed_files(self) -> None:
        self.count += 1
        self.reloaded.set()

    async def next(self) -> None:
        async with asyncio.timeout(20):
            await self.reloaded.wait()
        self.reloaded.clear()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "POLL_S", 0.005)


async def test_a_change_of_permissions_alone_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("version: 1")
    path.chmod(0o200)
    reloads = Reloads(path)
    watcher = FileWatcher(reloads)
    await watcher.start()
    try:
        await reloads.next()
        path.chmod(0o600)
        await reloads.next()
    finally:
        await watcher.stop()
    assert reloads.count == 2
