"""Tests of merging several workers' metrics pages: sums, other merge rules, any label value."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from gateway.metrics import exposition
from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import FamilyReading, FamilySpec, HistogramValue, Merge
from gateway.metrics.quantile_sketch import BucketCounts, bucket_of
from gateway.trials.canary import summarize_arm
from gateway.workers import page_merge


def page(requests: int, up: float, ttft_s: float) -> list[FamilyReading]:
    metrics = Metrics()
    metrics.pool_by_label = lambda: {
        ("model", 'a "model"\\\n'): "main",
        ("endpoint", "a:1"): "chat",
    }
    metrics.requests_total.labels('a "model"\\\n', "200", "served").inc(requests)
    metrics.endpoint_up.labels("a:1").set(up)
    metrics.shared_staleness_seconds.set(ttft_s)
    metrics.ttft_seconds.labels("m", "a:1").observe(ttft_s)
    return list(metrics.collect())


def text(*pages: list[FamilyReading], exemplars: bool = False) -> str:
    return exposition.render_page(page_merge.merge_families(pages), exemplars=exemplars).decode()


def test_counters_and_histograms_are_summed_and_gauges_follow_their_rules() -> None:
    merged = text(page(3, 1.0, 0.002), page(4, 0.0, 0.03))
    assert (
        'penstock_requests_total{code="200",model="a \\"model\\"\\\\\\n",pool="main",'
        'reason="served"} 7.0' in merged
    )
    assert 'penstock_endpoint_up{endpoint="a:1",pool="chat"} 0.0' in merged
    assert "penstock_shared_staleness_seconds 0.03" in merged
    assert 'penstock_ttft_seconds_count{endpoint="a:1",model="m",pool="chat"} 2.0' in merged
    assert (
        'penstock_ttft_seconds_bucket{endpoint="a:1",le="0.005",model="m",pool="chat"} 1.0'
        in merged
    )
    assert (
        'penstock_ttft_seconds_bucket{endpoint="a:1",le="+Inf",model="m",pool="chat"} 2.0' in merged
    )


@pytest.mark.parametrize("exemplars", [False, True])
def test_the_page_of_one_worker_is_the_page_of_a_gateway_without_workers(exemplars: bool) -> None:
    alone = page(3, 1.0, 0.002)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(alone), type=list[FamilyReading])
    assert (
        text(sent, exemplars=exemplars)
        == exposition.render_page(alone, exemplars=exemplars).decode()
    )


def test_each_bucket_has_the_newest_exemplar_of_all_workers() -> None:
    one, other = Metrics(), Metrics()
    for metrics, marks in (
        (one, ((0.2, 10.0, "old", ""), (9000.0, 11.0, "slow", "4bf92f"))),
        (other, ((0.21, 12.0, "new", ""), (0.05, 9.0, "fast", ""))),
    ):
        for mark in marks:
            metrics.ttft_seconds.labels("m", "a").observe_request(mark)
    merged = text(*(list(each.collect(0.0)) for each in (one, other)), exemplars=True)
    family = next(each for each in openmetrics(merged) if each.name == "penstock_ttft_seconds")
    marked = {each.labels["le"]: each.exemplar.labels for each in family.samples if each.exemplar}
    assert marked == {
        "0.06": {"request_id": "fast"},
        "0.25": {"request_id": "new"},
        "+Inf": {"request_id": "slow", "trace_id": "4bf92f"},
    }
    assert "request_id" not in text(list(one.collect()), list(other.collect()))


def gauge(name: str, value: float, rule: Merge = Merge.SUM) -> list[FamilyReading]:
    return [FamilyReading(FamilySpec(name, "gauge", "help", merge=rule), {(): value})]


def test_the_last_value_wins_with_the_rule_last() -> None:
    assert "\nx 1.0" in text(gauge("x", 3, Merge.LAST), gauge("x", 1, Merge.LAST))
    assert "\nx 3.0" in text(gauge("x", 3, Merge.MAX), gauge("x", 1, Merge.MAX))


def test_process_metrics_are_summed_and_the_earliest_start_time_wins() -> None:
    # File limits are summed too, so that the ratio of open files is the mean over processes.
    one, other = list(Metrics().collect()), list(Metrics().collect())
    for page, more in ((one, 1), (other, 3)):
        for reading in page:
            if reading.spec.name.startswith("process_"):
                reading.values[()] = 100.0 * more
    merged = text(one, other)
    assert "\nprocess_start_time_seconds 100.0\n" in merged
    for name in (
        "cpu_seconds_total",
        "resident_memory_bytes",
        "virtual_memory_bytes",
        "open_fds",
        "max_fds",
    ):
        assert f"\nprocess_{name} 400.0\n" in merged


def test_a_histogram_with_other_buckets_is_left_out() -> None:
    def lag(*bounds: float) -> list[FamilyReading]:
        spec = FamilySpec("lag_seconds", "histogram", "help", buckets=bounds)
        return [FamilyReading(spec, {(): HistogramValue([1] * (len(bounds) + 1), 1.0)})]

    assert "lag_seconds_count 3.0" in text(lag(1.0, 2.0), lag(1.0))
    assert "lag_seconds_count 6.0" in text(lag(1.0, 2.0), lag(1.0, 2.0))


def endpoint(in_flight: int, *, available: bool) -> dict[str, object]:
    state = "up" if available else "ejected"
    rest = {
        "connections": 1,
        "in_flight_elsewhere": 9,
        "state": state,
        "cause": None,
        "slow": None,
        "back_in_s": None,
    }
    return {
        "pool": "main",
        "url": "http://a:1",
        "in_flight": in_flight,
        "available": available,
    } | rest


def test_an_available_endpoint_is_slow_if_any_worker_says_so() -> None:
    slow = endpoint(1, available=True) | {"slow": {"ratio": 4.1}}
    out = endpoint(1, available=False)
    for rows, expected in (
        ([endpoint(1, available=True), slow, endpoint(1, available=True)], {"ratio": 4.1}),
        ([slow, endpoint(1, available=True)], {"ratio": 4.1}),
        ([out, slow], None),
        ([slow, out], None),
    ):
        (merged,) = page_merge.merge_endpoints([{"endpoints": [row]} for row in rows])["endpoints"]
        assert merged["slow"] == expected


def test_an_endpoint_is_listed_once_with_sums_and_is_available_if_all_workers_agree() -> None:
    merged = page_merge.merge_endpoints(
        [
            {"endpoints": [endpoint(2, available=True)], "pairs": []},
            {"endpoints": [endpoint(3, available=False)], "pairs": []},
        ]
    )
    (one,) = merged["endpoints"]
    assert (one["in_flight"], one["in_flight_elsewhere"], one["connections"]) == (5, 0, 2)
    assert (one["available"], one["state"]) == (False, "ejected")
    assert merged["pairs"] == []


def shadows(picks: int, agreed: int, differed: int, gain_s: float | None) -> dict[str, object]:
    answered = agreed + differed
    policy = {
        "policy": "priced",
        "agreed": agreed,
        "differed": differed,
        "no_endpoint": 0,
        "failed": 1,
        "agreement": agreed / answered if answered else None,
        "ttft_gain_s": gain_s,
        "cached_tokens_gain": 10.0 if answered else None,
        "cost_us": 8.0,
    }
    pool = {
        "pool": "main",
        "picks": picks,
        "scored": answered + 1,
        "pick_us": 20.0,
        "cost_share": 0.1,
    }
    return {"shadows": [pool | {"policies": [policy]}]}


def test_shadow_results_cover_the_requests_of_all_workers() -> None:
    (merged,) = page_merge.merge_shadows(
        [shadows(100, 30, 10, 0.2), shadows(300, 10, 0, -0.2), shadows(0, 0, 0, None)]
    )["shadows"]
    assert (merged["picks"], merged["scored"], merged["pick_us"], merged["cost_share"]) == (
        400,
        53,
        20.0,
        0.1,
    )
    assert merged["policies"] == [
        {
            "policy": "priced",
            "agreed": 40,
            "differed": 10,
            "no_endpoint": 0,
            "failed": 3,
            "conclusive": False,
            "agreement": 0.8,
            "ttft_gain_s": 0.12,
            "cached_tokens_gain": 10.0,
            "cost_us": 8.0,
        }
    ]
    assert page_merge.merge_shadows([{"shadows": []}, {"shadows": []}]) == {"shadows": []}


def test_scores_of_all_workers_decide_whether_a_shadow_is_conclusive() -> None:
    (merged,) = page_merge.merge_shadows([shadows(100, 50, 10, 0.1), shadows(100, 30, 10, 0.1)])[
        "shadows"
    ]
    assert merged["policies"][0]["conclusive"] is True


def canary(met: int, late: int, ttft: BucketCounts) -> dict[str, object]:
    arms = [
        summarize_arm("primary", "a", {"met": met, "ttft": late, "unknown": 1}, ttft),
        summarize_arm("canary", "b", {}, {}),
    ]
    return {"canaries": [{"pool": "main", "share": "5 %", "arms": arms}]}


def test_canary_arms_cover_the_requests_and_observations_of_all_workers() -> None:
    quick, slow = {bucket_of(0.1): 60}, {bucket_of(1.0): 100}
    (merged,) = page_merge.merge_canaries([canary(50, 10, quick), canary(70, 30, slow)])["canaries"]
    primary, other = merged["arms"]
    assert (primary["requests"], primary["goodput"]) == (162, 0.75)
    assert primary["ttft_p50_s"] == primary["ttft_p99_s"] == pytest.approx(1.0, rel=0.011)
    assert (other["requests"], other["goodput"], other["ttft_p50_s"]) == (0, None, None)
