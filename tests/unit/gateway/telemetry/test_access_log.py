"""Tests that threads write the access log, so that the event loop does not wait."""

from __future__ import annotations

import asyncio
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


def to(file: Path, **settings: Any) -> Observability:
    return Observability.model_validate(
        {"access_log": str(file), "access_flush": "1ms", **settings}
    )


LINE = AccessLine(0.0, "req_1", "127.0.0.1", "/v1/chat/completions", 429, "refused", 10)


async def test_the_loop_does_not_wait_for_the_start_of_the_writing_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    monkeypatch.setattr(
        access_log, "start_new_thread", lambda write, rows: begun.append((write, rows))
    )
    file, dropped = tmp_path / "access.jsonl", Counter()
    log = AccessLog(to(file), asyncio.get_running_loop(), dropped)
    log.write(LINE)
    while not begun:
        await asyncio.sleep(0)
    assert file.read_bytes() == b""
    ((write, rows),) = begun
    write(*rows)
    await log.close()
    assert file.read_bytes().count(b'"req_1"') == 1
    assert dropped.value == 0


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
