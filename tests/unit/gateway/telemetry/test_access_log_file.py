"""Tests that the access log file may be moved, truncated and rotated while processes append to
it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from gateway.telemetry.access_log_file import LogFile, Rotation

LINES, PROCESSES = 400, 4


def append(file: Path, rotation: Rotation | None, name: int, lines: int) -> None:
    log = LogFile(str(file), rotation)
    for number in range(0, lines, 4):
        log.write(
            b"".join(b"%d-%d %s\n" % (name, each, b"x" * 200) for each in range(number, number + 4))
        )
    log.close()


def lines_of(*files: Path) -> list[str]:
    return [line for file in files for line in file.read_text().splitlines()]


def test_lines_go_to_a_new_file_after_the_old_one_was_moved(tmp_path: Path) -> None:
    file, old = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    log = LogFile(str(file))
    assert log.write(b"first\n") == 0
    file.rename(old)
    assert log.write(b"second\n") == 0
    assert (lines_of(old), lines_of(file)) == (["first"], ["second"])
    assert os.stat(file).st_mode & 0o777 & ~0o640 == 0


def test_lines_continue_at_the_start_of_a_truncated_file(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    log = LogFile(str(file))
    log.write(b"first\n")
    os.truncate(file, 0)
    log.write(b"second\n")
    assert file.read_bytes() == b"second\n"


def test_lines_stay_in_the_open_file_when_its_folder_is_gone(tmp_path: Path) -> None:
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    log = LogFile(str(folder / "access.jsonl"))
    folder.rename(moved)
    assert log.write(b"line\n") == 0
    assert lines_of(moved / "access.jsonl") == ["line"]


def test_processes_that_share_a_file_rotate_it_without_losing_or_tearing_a_line(
    tmp_path: Path,
) -> None:
    file, rotation = tmp_path / "access.jsonl", Rotation(size=8192, keep=1000)
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=append, args=(file, rotation, each, LINES))
        for each in range(PROCESSES)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    files = list(tmp_path.iterdir())
    assert len(files) > LINES * PROCESSES * 200 // 8192 // 2
    assert all(each.stat().st_size <= 8192 + PROCESSES * 4 * 220 for each in files)
    counter = Counter(lines_of(*files))
    assert counter == Counter(
        f"{name}-{each} {'x' * 200}" for name in range(PROCESSES) for each in range(LINES)
    )


def test_the_number_of_older_files_is_limited_and_the_newest_lines_are_in_the_newest(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access.jsonl"
    append(file, Rotation(size=4096, keep=3), 0, LINES)
    assert {each.name for each in tmp_path.iterdir()} == {
        "access.jsonl",
        *(f"access.jsonl.{n}" for n in (1, 2, 3)),
    }
    newest_first = [file, *(tmp_path / f"access.jsonl.{n}" for n in (1, 2, 3))]
    numbers = [
        int(line.split()[0].removeprefix("0-"))
        for each in reversed(newest_first)
        for line in lines_of(each)
    ]
    assert numbers == list(range(numbers[0], LINES))


def test_a_full_disk_costs_the_lines_that_did_not_fit_and_tears_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "access.jsonl"
    log, write = LogFile(str(file)), os.write
    room = [10]

    def full_disk(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", full_disk)
        assert log.write(b"one\ntwo\nthree\nfour\n") == 2
        assert log.write(b"five\n") == 1
    assert log.write(b"six\nseven\n") == 0
    assert lines_of(file) == ["one", "two", "th", "six", "seven"]
