"""Between two notes: rates, percentiles of merged buckets, and a minute's worth of memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from statistics import quantiles

from hypothesis import given
from hypothesis import strategies as st

from gateway.live.marks import KEEP_S, Marks, grown, merged, quantile, rise
from tests.unit.gateway.live.empty import mark

BOUNDS = (0.1, 0.2, 0.5, 1.0, 5.0)


def counted(values: list[float]) -> tuple[int, ...]:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect_left(BOUNDS, value)] += 1
    return tuple(counts)


def test_a_percentile_lies_on_a_straight_line_within_its_bucket() -> None:
    assert quantile(BOUNDS, (0, 10, 0, 0, 0, 0), 0.5) == 0.15000000000000002
    assert quantile(BOUNDS, (0, 0, 0, 0, 0, 3), 0.99) == 5.0
    assert quantile(BOUNDS, (0,) * 6, 0.5) is None
    assert quantile(BOUNDS, (), 0.5) is None


@given(st.lists(st.floats(0.001, 4.9), min_size=2, max_size=60), st.integers(1, 99))
def test_a_percentile_is_in_the_bucket_of_the_true_one(values: list[float], percent: int) -> None:
    found = quantile(BOUNDS, counted(values), percent / 100)
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    true = ordered[max(0, rank - 1)]
    at = bisect_left(BOUNDS, true)
    assert found is not None
    assert (BOUNDS[at - 1] if at else 0.0) <= found <= BOUNDS[at]
    assert quantiles(values, n=100, method="inclusive")  # the data can be ranked at all


@given(st.lists(st.lists(st.floats(0.001, 9.0), max_size=20), max_size=5))
def test_merged_buckets_are_those_of_all_observations(parts: list[list[float]]) -> None:
    everything = [value for part in parts for value in part]
    assert sum(merged([counted(part) for part in parts])) == len(everything)
    if parts:
        assert merged([counted(part) for part in parts]) == counted(everything)


def test_growth_is_what_came_since_and_a_series_that_began_anew_counts_from_nothing() -> None:
    assert grown((3, 5), (1, 5)) == (2, 0)
    assert grown((3, 5), ()) == (3, 5)
    assert grown((1, 0), (4, 2)) == (1, 0)
    assert rise({"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 1.0}) == {"a": 2.0, "c": 2.0}


def test_a_minute_is_kept_and_notes_too_close_are_not() -> None:
    marks = Marks()
    for step in range(400):
        marks.keep(mark(at=step * 0.5))
    kept = [each.at for each in marks]
    assert kept[-1] - kept[0] <= KEEP_S
    assert all(later - earlier >= 0.95 for earlier, later in itertools.pairwise(kept))
    assert len(kept) == 62


def test_the_note_to_compare_with_is_the_youngest_that_is_old_enough() -> None:
    marks = Marks()
    assert marks.before(5.0, 10.0) is None
    for at in (0.0, 5.0, 10.0, 15.0):
        marks.keep(mark(at=at))
    old, oldest = marks.before(21.0, 10.0), marks.before(21.0, 60.0)
    assert (old and old.at, oldest and oldest.at) == (10.0, 0.0)
