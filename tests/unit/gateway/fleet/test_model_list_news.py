"""Changes of engines' model lists: the first is reported at once, many are reported together."""

from __future__ import annotations

import asyncio
import time

from gateway.fleet.model_list_news import ModelListNews


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


async def test_changes_soon_after_a_long_report_are_reported_together() -> None:
    reports = list[int]()

    def report() -> None:
        time.sleep(0.005)
        reports.append(1)

    news = ModelListNews(report)
    for _ in range(5):
        news.on_changed()
    assert reports == [1]
    await asyncio.sleep(0.15)
    assert reports == [1, 1]


async def test_nothing_is_reported_after_the_end() -> None:
    reports = list[int]()

    def report() -> None:
        time.sleep(0.002)
        reports.append(1)

    news = ModelListNews(report)
    news.on_changed()
    news.on_changed()
    news.close()
    await asyncio.sleep(0.05)
    assert reports == [1]
