"""Tests of progress bars, for work in sequence and in parallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from planner import progress_bar as progress
from planner.progress_bar import ShowProgress, progress_bar, progress_rows


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "can_show_progress", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then


def test_simultaneous_work_has_a_bar_for_each_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_rows(is_quiet=False) as show:
        show("8 x TP 4", 0.0)
        show("4 x TP 8", 0.25)
        show("8 x TP 4", 0.5)
    shown = capsys.readouterr().err
    frame = shown[shown.rindex("8 x TP 4") :]
    assert " 50%" in frame
    assert "4 x TP 8" in frame
    assert " 25%" in frame


def test_work_in_sequence_has_one_bar_with_the_present_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar(is_quiet=False) as show:
        show("first", 0.5)
        show("second", 0.5)
    shown = capsys.readouterr().err
    assert "first" not in shown[shown.rindex("second") :]


@pytest.mark.parametrize("bars", [progress_bar, progress_rows])
def test_a_quiet_command_shows_nothing(
    bars: Callable[[bool], AbstractContextManager[ShowProgress]], capsys: pytest.CaptureFixture[str]
) -> None:
    with bars(True) as show:
        show("work", 0.5)
    assert capsys.readouterr().err == ""
