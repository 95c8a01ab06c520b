"""Tests of the parallel test runner: it runs every test file, and reports every failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import parallel
from tests.parallel import COMPUTING, WAITING, Parts, parts

TESTS = Path(__file__).parents[2]
WITH_TARGETS_OF_THEIR_OWN = {"deploy", "image", "rdma", "real", "web", "wheel"}


def run_parts(monkeypatch: pytest.MonkeyPatch, folder: Path, **tests: str) -> int:
    # Run test files with these texts in two processes, one file in each part.
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(parallel, "ROOT", folder)
    monkeypatch.setattr(parallel, "LINES_OF_A_PART", {"": 1})
    monkeypatch.setattr(parallel, "WAITING", ("",))
    monkeypatch.setattr(parallel, "COMPUTING", ())
    monkeypatch.chdir(folder)
    (folder / "logs").mkdir()
    return Parts(folder / "logs", places=2, with_types=False).run()


def test_every_test_file_without_a_target_of_its_own_is_in_one_part() -> None:
    found = sorted(name for part in (*parts(WAITING), *parts(COMPUTING)) for name in part)
    expected = sorted(
        str(path.relative_to(TESTS.parent))
        for path in TESTS.rglob("test_*.py")
        if path.relative_to(TESTS).parts[0] not in WITH_TARGETS_OF_THEIR_OWN
    )
    assert found == expected


def test_passed_tests_of_all_parts_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "def test_one():\n    pass\ndef test_two():\n    pass\n"
    assert run_parts(monkeypatch, tmp_path, a=text, b=text, c=text) == 0
    assert "\n6 passed in " in capfd.readouterr().out


def test_a_failure_is_shown_with_its_output_and_does_not_stop_other_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = "def test_one():\n    print('why')\n    assert False\n"
    passing = "def test_one():\n    pass\n"
    assert run_parts(monkeypatch, tmp_path, a=failing, b=passing) == 1
    output = capfd.readouterr().out
    assert "why" in output
    assert "1 failed" in output
    assert "1 passed" in output
    assert output.endswith("Failed:\n  test_a.py\n")


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_a_process_that_ends_before_its_tests_do_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str
) -> None:
    dying = f"import os, signal\ndef test_one():\n    {end}\n"
    assert run_parts(monkeypatch, tmp_path, a=dying) == 1
    assert capfd.readouterr().out.endswith("Failed:\n  test_a.py\n")


def test_parts_are_forked_from_a_process_without_other_threads() -> None:
    if not (pid := os.fork()):
        status = 1
        try:
            parallel.preload()
            import threading

            status = threading.active_count() - 1
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
