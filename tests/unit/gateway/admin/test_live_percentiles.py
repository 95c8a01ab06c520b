"""Tests of the percentiles on the live page, which `penstock top` shows too."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from gateway.admin.live_fleet_status import FleetStatus
from gateway.admin.live_metric_samples import SampleHistory, sample_difference
from gateway.admin.live_view import build_view
from gateway.metrics.quantile_sketch import bucket_of
from tests.unit.gateway.admin.empty import mark

SAMPLES = 10_000


def status() -> FleetStatus:
    row = {"name": "a:1", "url": "http://a:1", "pool": "main", "role": "both", "in_flight": 0}
    row |= {"state": "up", "cause": None, "slow": None, "since_s": None, "available": True}
    row |= {"silence_s": 1.0, "waiting": 0, "backlog_tokens": 0, "backlog_s": 0.0}
    pool = {"name": "main", "in_flight": 0, "waiting": 0, "price": 0.0}
    budgets = {"standard": (5.0, 0.1)}
    return FleetStatus({"version": 1}, budgets, "standard", [pool], [row], {}, 0, 0, None)


def seconds(median_s: float, count: int) -> list[float]:
    rng = Random(count)
    return sorted(median_s * rng.lognormvariate(0.0, 1.0) for _ in range(count))


def shown(ttft: list[float], tpot: list[float]) -> dict[str, Any]:
    sketches = {
        name: {"a:1": dict(Counter(map(bucket_of, values)))}
        for name, values in (("ttft", ttft), ("tpot", tpot))
    }
    history = SampleHistory()
    history.append(mark(at=0.0))
    return build_view(status(), history, mark(at=1.0, **sketches))


def test_percentiles_of_the_fleet_and_of_an_endpoint_are_those_of_all_samples() -> None:
    ttft, tpot = seconds(0.3, SAMPLES), seconds(0.02, SAMPLES)
    view = shown(ttft, tpot)
    (row,) = view["endpoints"]
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        exact = {share: values[SAMPLES * share // 100 - 1] for share in (50, 95, 99)}
        for share, value in exact.items():
            assert view["totals"][name][f"p{share}_s"] == pytest.approx(value, rel=0.02)
        for share in (50, 95):
            assert row[f"{name}_p{share}_s"] == pytest.approx(exact[share], rel=0.02)


@pytest.mark.parametrize("value", [0.0123, 0.039, 0.7654, 12.34])
def test_one_request_is_shown_with_its_own_time_and_not_with_the_edge_of_a_bucket(
    value: float,
) -> None:
    totals = shown([value], [value / 10])["totals"]
    assert totals["ttft"]["count"] == 1
    assert totals["ttft"]["p50_s"] == pytest.approx(value, rel=0.02)
    assert totals["tpot"]["p50_s"] == pytest.approx(value / 10, rel=0.02)


def test_a_chart_shows_the_95th_percentile_of_the_time_between_two_samples() -> None:
    before = mark(at=1.0, ttft={"a:1": {bucket_of(9.0): 500}})
    grown = before.ttft["a:1"] | {bucket_of(0.1): 90, bucket_of(2.0): 10}
    after = mark(at=2.0, ttft={"a:1": grown})
    assert sample_difference(before, after).ttft_p95_s == pytest.approx(2.0, rel=0.02)
