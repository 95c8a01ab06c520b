"""Tests of reports about changed model lists: the first at once, later ones together."""

from __future__ import annotations

import asyncio

import pytest

from gateway.fleet import model_list_changes
from gateway.fleet.model_list_changes import GAP_PER_REPORT, ModelListNews
from tests.duration_limits import PATIENCE_S
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

REPORT_S = 0.002


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    # Return a list of reports, by whose number the clock of the module advances, and only by it.
    made = list[float]()
    monkeypatch.setattr(model_list_changes, "monotonic", lambda: REPORT_S * len(made))
    return made


async def test_a_single_change_is_reported_at_once() -> None:
    reports = list[int]()
    news = ModelListNews(lambda: reports.append(1))
    news.on_changed()
    assert reports == [1]


async def test_changes_during_the_first_polls_are_reported_once_at_their_end() -> None:
    reports = list[int]()
    news = ModelListNews(lambda: reports.append(1))
    with news.held_back():
        news.on_changed()
        news.on_changed()
        assert reports == []
    assert reports == [1]


async def test_changes_soon_after_a_long_report_are_reported_together(
    reports: list[float],
) -> None:
    news = ModelListNews(lambda: reports.append(REPORT_S))
    for _ in range(5):
        news.on_changed()
    assert len(reports) == 1
    async with asyncio.timeout(PATIENCE_S):
        while len(reports) == 1:
            await asyncio.sleep(REPORT_S)
    await asyncio.sleep(2 * GAP_PER_REPORT * REPORT_S)
    assert len(reports) == 2


async def test_nothing_is_reported_after_the_end(reports: list[float]) -> None:
    news = ModelListNews(lambda: reports.append(REPORT_S))
    news.on_changed()
    news.on_changed()
    news.close()
    await asyncio.sleep(2 * GAP_PER_REPORT * REPORT_S)
    assert len(reports) == 1
