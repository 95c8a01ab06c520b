"""Property tests: percentiles and summaries of any samples equal those of numpy."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from planner.bench.percentiles import convert_unit, percentile, summarise

samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(samples, st.floats(0, 100))
def test_a_percentile_is_the_one_numpy_gives(values: list[float], percent: float) -> None:
    expected = float(numpy.percentile(values, percent))
    assert abs(percentile(sorted(values), percent) - expected) <= 1e-9 * max(expected, 1.0)


@given(samples)
def test_a_summary_agrees_with_numpy_and_is_ordered(values: list[float]) -> None:
    summary = summarise(values)
    assert summary is not None
    assert summary.count == len(values)
    assert numpy.isclose(summary.mean, numpy.mean(values))
    assert numpy.isclose(summary.std, numpy.std(values), atol=1e-6)
    ordered = [summary.min, summary.p50, summary.p90, summary.p95, summary.p99, summary.max]
    assert ordered == sorted(ordered)


@given(samples, st.floats(0.001, 1000))
def test_changing_the_unit_changes_the_unit_and_nothing_else(
    values: list[float], factor: float
) -> None:
    summary = summarise(values)
    assert summary is not None
    changed, direct = convert_unit(summary, factor), summarise([value * factor for value in values])
    assert direct is not None
    assert changed.count == direct.count
    assert numpy.isclose(changed.p95, direct.p95)
    assert numpy.isclose(changed.mean, direct.mean)
