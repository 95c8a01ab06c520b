"""Tests of differences between consecutive metric samples, and their history of one minute."""

from __future__ import annotations

import itertools

from gateway.admin.metric_samples import HISTORY_S, SampleHistory, counter_growth
from tests.unit.gateway.admin.empty import mark


def test_growth_contains_only_counters_that_have_grown() -> None:
    assert counter_growth({"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 1.0}) == {
        "a": 2.0,
        "c": 2.0,
    }


def test_history_keeps_one_minute_and_drops_samples_that_are_too_close() -> None:
    marks = SampleHistory()
    for step in range(400):
        marks.append(mark(at=step * 0.5))
    times = [sample.at for sample in marks]
    assert times[-1] - times[0] <= HISTORY_S
    assert all(later - earlier >= 0.95 for earlier, later in itertools.pairwise(times))
    assert len(times) == 62


def test_find_before_returns_the_newest_sample_that_is_old_enough() -> None:
    marks = SampleHistory()
    assert marks.find_before(5.0, 10.0) is None
    for at in (0.0, 5.0, 10.0, 15.0):
        marks.append(mark(at=at))
    old, oldest = marks.find_before(21.0, 10.0), marks.find_before(21.0, 60.0)
    assert (old and old.at, oldest and oldest.at) == (10.0, 0.0)
