"""Tests that a thread writes the access log, so that the event loop does not wait."""

from __future__ import annotations

import asyncio
import os
import threading
from _thread import start_new_thread
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import Observability
from gateway.metrics.metric_types import Counter
from gateway.telemetry import access_log
from gateway.telemetry.access_line import AccessLine
from gateway.telemetry.access_log import LINES_PER_BLOCK, AccessLog
from tests.duration_limits import PATIENCE_S


def to(file: Path, **settings: Any) -> Observability:
    return Observability.model_validate(
        {"access_log": str(file), "access_flush": "1ms", **settings}
    )


LINE = AccessLine(0.0, "req_1", "127.0.0.1", "/v1/chat/completions", 429, "refused", 10)


async def test_the_loop_does_not_wait_for_the_start_of_the_writing_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    monkeypatch.setattr(access_log, "start_new_thread", lambda run, rows: begun.append((run, rows)))
    file, dropped = tmp_path / "access.jsonl", Counter()
    log = AccessLog(to(file), asyncio.get_running_loop(), dropped)
    log.write(LINE)
    while not begun:
        await asyncio.sleep(0)
    assert file.read_bytes() == b""
    start_new_thread(*begun.pop())
    await log.close()
    assert file.read_bytes().count(b'"req_1"') == 1
    assert dropped.value == 0


async def test_one_thread_writes_all_blocks_and_ends_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[threading.Thread] = []

    def start(run: Callable[[], None], _: tuple[()]) -> None:
        begun.append(threading.Thread(target=run, daemon=True))
        begun[-1].start()

    monkeypatch.setattr(access_log, "start_new_thread", start)
    file = tmp_path / "access.jsonl"
    log = AccessLog(to(file), asyncio.get_running_loop(), Counter())
    for count in range(1, 4):
        log.write(LINE)
        while file.read_bytes().count(b'"req_1"') < count:
            await asyncio.sleep(0.001)
    await log.close()
    (thread,) = begun
    thread.join(5)
    assert not thread.is_alive()


async def test_a_slow_disk_holds_up_later_lines_but_not_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fast, write = threading.Event(), os.write

    def slow_write(fd: int, data: memoryview) -> int:
        is_fast.wait(10)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow_write)
    file = tmp_path / "access.jsonl"
    log = AccessLog(to(file), asyncio.get_running_loop(), Counter())
    for _ in range(3):
        log.write(LINE)
        await asyncio.sleep(0.005)
    assert not file.read_bytes()
    is_fast.set()
    await log.close()
    assert file.read_bytes().count(b'"req_1"') == 3


async def test_lines_that_the_disk_refuses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    dropped = Counter()
    log = AccessLog(to(tmp_path / "access.jsonl"), asyncio.get_running_loop(), dropped)
    log.write(LINE)
    log.write(LINE)
    await log.close()
    await asyncio.sleep(0)
    assert dropped.value == 2


async def test_a_full_buffer_is_written_before_the_timer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "WRITE_BYTES", 5000)
    file, rows = tmp_path / "access.jsonl", 0
    log = AccessLog(to(file, access_flush="1m"), asyncio.get_running_loop(), Counter())
    async with asyncio.timeout(PATIENCE_S):
        while not file.read_bytes():
            log.write(LINE)
            rows += 1
            await asyncio.sleep(0)
    assert rows >= LINES_PER_BLOCK
    await log.close()
    assert file.read_bytes().count(b'"req_1"') == rows


async def test_an_unexpected_error_loses_its_lines_but_not_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    file, dropped = tmp_path / "access.jsonl", Counter()
    log = AccessLog(to(file), asyncio.get_running_loop(), dropped)
    with monkeypatch.context() as failing:
        failing.setattr(os, "write", fail)
        log.write(LINE)
        async with asyncio.timeout(PATIENCE_S):
            while not dropped.value:
                await asyncio.sleep(0.001)
    log.write(LINE)
    await log.close()
    assert (file.read_bytes().count(b'"req_1"'), dropped.value) == (1, 1)


async def test_lines_without_a_thread_are_counted_and_later_ones_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    file, dropped = tmp_path / "access.jsonl", Counter()
    log = AccessLog(to(file), asyncio.get_running_loop(), dropped)
    with monkeypatch.context() as without:
        without.setattr(access_log, "start_new_thread", refused)
        log.write(LINE)
        while not dropped.value:
            await asyncio.sleep(0)
    log.write(LINE)
    await log.close()
    assert (file.read_bytes().count(b'"req_1"'), dropped.value) == (1, 1)


async def test_a_moved_file_is_closed_without_a_new_line(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    log = AccessLog(to(file), asyncio.get_running_loop(), Counter())
    log.write(LINE)
    while not file.read_bytes():
        await asyncio.sleep(0.001)
    file.rename(tmp_path / "access.jsonl.1")
    log.reopen()
    while not file.exists():
        await asyncio.sleep(0.001)
    log.write(LINE)
    await log.close()
    assert [file.read_bytes().count(b'"req_1"') for file in sorted(tmp_path.iterdir())] == [1, 1]


async def test_lines_stay_in_order_over_blocks_and_one_bad_line_loses_no_other(
    tmp_path: Path,
) -> None:
    file, dropped = tmp_path / "access.jsonl", Counter()
    log = AccessLog(to(file, access_flush="1m"), asyncio.get_running_loop(), dropped)
    names = [f"req_{number}" for number in range(3 * LINES_PER_BLOCK + 5)]
    for name in names:
        line = msgspec.structs.replace(LINE, id=name)
        if name == "req_40":
            line.tenant = "\ud800"  # a text that cannot be encoded as UTF-8
        log.write(line)
    await log.close()
    lines = [msgspec.json.decode(line, type=AccessLine) for line in file.read_bytes().splitlines()]
    assert [line.id for line in lines] == [name for name in names if name != "req_40"]
    assert lines[0] == msgspec.structs.replace(LINE, id="req_0")
    assert dropped.value == 1
