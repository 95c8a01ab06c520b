"""Tests of the differences between metric samples, from which the live page draws charts."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.admin.live_diagnosis import median_without
from gateway.admin.live_metric_samples import SampleHistory, count_failed, sample_difference
from gateway.metrics.quantile_sketch import bucket_of
from tests.unit.gateway.admin.empty import mark


def test_a_difference_has_rates_and_the_ttft_percentile() -> None:
    before = mark(at=10.0, responses={("200", "served"): 5.0}, ttft={"a": {bucket_of(0.2): 5}})
    responses = {
        ("200", "served"): 9.0,
        ("503", "no_capacity"): 1.0,
        ("429", "too_slow"): 2.0,
        ("200", "reset"): 1.0,
    }
    after = replace(
        before,
        at=12.0,
        responses=responses,
        shed={"too_slow": 2.0},
        tokens=64.0,
        ttft={"a": {bucket_of(0.2): 9}},
    )
    found = sample_difference(before, after)
    assert (found.requests_per_s, found.shed_per_s, found.errors_per_s, found.tokens_per_s) == (
        4.0,
        1.0,
        1.0,
        32.0,
    )
    assert found.ttft_p95_s == pytest.approx(0.2, rel=0.01)
    assert sample_difference(after, replace(after, at=13.0)).ttft_p95_s is None


def test_client_disconnects_and_rejections_are_not_failures() -> None:
    assert (
        count_failed(
            {("499", "decode"): 3.0, ("429", "too_slow"): 2.0, ("404", "model_not_found"): 1.0}
        )
        == 0
    )


def test_differences_include_one_from_the_newest_sample_to_now() -> None:
    marks = SampleHistory()
    assert marks.differences(mark()) == []
    for at in range(100):
        marks.append(mark(at=float(at)))
    assert len(marks.differences(mark(at=99.1))) == len(list(marks)) - 1
    assert [each.at for each in marks.differences(mark(at=99.8))][-1] == 99.8


@given(st.lists(st.floats(0.001, 100.0), min_size=3, max_size=30), st.data())
def test_median_without_leaves_out_exactly_one_value(
    values: list[float], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    others = values[:at] + values[at + 1 :]
    assert median_without(sorted(values), values[at]) == median(others)
