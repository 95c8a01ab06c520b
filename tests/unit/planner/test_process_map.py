"""Tests of computations in several processes: order of results, progress, errors, and the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.process_map import ReportShare, WorkerError, map_in_processes

ROOT = Path(__file__).parents[3]
INTERRUPTED = """
from tests.unit.planner.test_process_map import wait_forever
from planner.process_map import map_in_processes
map_in_processes(wait_forever, [{folder!r} + "/a", {folder!r} + "/b"], 2, lambda *_: None)
"""


def square(number: int, report_share: ReportShare) -> tuple[int, int]:
    for share in range(1001):
        report_share(share / 1000)
    return number * number, os.getpid()


def fail_at_two(number: int, report_share: ReportShare) -> int:
    if number == 2:
        raise ValueError("the test lets the computation of item 2 fail")
    return number


def kill_itself_at_two(number: int, report_share: ReportShare) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_forever(file: str, report_share: ReportShare) -> None:
    Path(file).write_text(str(os.getpid()))
    signal.pause()


def test_results_are_in_the_order_of_the_items_whatever_the_number_of_processes() -> None:
    for processes in (1, 2, 8):
        found = map_in_processes(square, [3, 1, 2], processes, lambda *_: None)
        assert [value for value, _ in found] == [9, 1, 4]
        own = {pid for _, pid in found}
        assert own == {os.getpid()} if processes == 1 else len(own - {os.getpid()}) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_the_progress_of_every_item_is_reported_once_per_percent(processes: int) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def add(index: int, share: float) -> None:
        seen[index].append(int(100 * share))

    map_in_processes(square, [5, 6], processes, add)
    assert seen == {0: list(range(101)), 1: list(range(101))}


def test_an_error_in_a_process_is_raised_with_its_traceback_and_item() -> None:
    with pytest.raises(
        WorkerError, match=r"in fail_at_two(.|\n)*ValueError: the test lets"
    ) as found:
        map_in_processes(fail_at_two, [1, 2, 3], 2, lambda *_: None)
    assert found.value.index == 1


def test_a_killed_process_is_an_error_that_says_how_it_ended() -> None:
    with pytest.raises(WorkerError, match="its process ended with SIGKILL") as found:
        map_in_processes(kill_itself_at_two, [1, 2, 3], 2, lambda *_: None)
    assert found.value.index == 1


def test_an_error_of_the_callback_ends_the_processes(tmp_path: Path) -> None:
    files = [str(tmp_path / "a"), str(tmp_path / "b")]

    def refuse(index: int, share: float) -> None:
        raise KeyError(index)

    with pytest.raises(KeyError):
        map_in_processes(report_forever, files, 2, refuse)
    assert not multiprocessing.active_children()


def test_ctrl_c_ends_every_process_without_a_word_from_them(tmp_path: Path) -> None:
    code = INTERRUPTED.format(folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        pids = [_pid_in(tmp_path / name) for name in ("a", "b")]
        os.killpg(process.pid, signal.SIGINT)  # on Ctrl-C, the terminal signals the whole group too
        _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1, "that of the calling process"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def is_interrupt_blocked(_: str, __: ReportShare) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_reaches_none_of_the_processes() -> None:
    code = (
        "from planner.process_map import map_in_processes\n"
        "from tests.unit.planner.test_process_map import is_interrupt_blocked\n"
        "if __name__ == '__main__':\n"
        "    print(map_in_processes(is_interrupt_blocked, ['a', 'b'], 2, lambda *_: None))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "[True, True]\n"


def test_processes_end_with_a_killed_caller(tmp_path: Path) -> None:
    code = INTERRUPTED.format(folder=str(tmp_path)).replace("wait_forever", "report_forever")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        pids = [_pid_in(tmp_path / name) for name in ("a", "b")]
        process.kill()
    for pid in pids:
        _await_end(pid)


def report_forever(file: str, report_share: ReportShare) -> None:
    Path(file).write_text(str(os.getpid()))
    share = 0.0
    while True:
        share += 0.01
        report_share(share)
        time.sleep(0.01)


def _pid_in(file: Path) -> int:
    for _ in range(6000):
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{file} was not written within a minute")


def _await_end(pid: int) -> None:
    for _ in range(6000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} still runs after a minute")
