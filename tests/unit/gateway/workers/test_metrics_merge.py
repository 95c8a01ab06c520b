"""Tests of combining the metrics of several workers: sums, the rules of gauges, exemplars."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from gateway.metrics import exposition
from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import FamilyReading, FamilySpec, HistogramValue, Merge
from gateway.workers.metrics_merge import merge_families


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
    return exposition.render_page(merge_families(pages), exemplars=exemplars).decode()


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
