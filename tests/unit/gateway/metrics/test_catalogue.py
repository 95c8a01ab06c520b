"""Tests that Prometheus can read the metrics, and that label values are limited in number."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.metrics import exposition
from gateway.metrics.catalogue import TTFT_BUCKETS_S, Metrics
from gateway.metrics.labels import Row
from gateway.metrics.metric_types import (
    MAX_NEW,
    OTHER_VALUES,
    Histogram,
    Label,
    Merge,
    MetricFamily,
    MetricRegistry,
)
from gateway.metrics.quantile_sketch import bucket_of
from gateway.util.work_in_turns import run_at_once

ROOT = Path(__file__).parents[4]


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    result: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            assert isinstance(sample, Sample)
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in result, f"{key} is exposed twice"
            result[key] = sample.value
    return result


def test_a_scrape_shows_the_counted_values() -> None:
    metrics = Metrics()
    metrics.requests_total.labels("demo-8b", "200", "ok").inc(3)
    metrics.inflight.labels("127.0.0.1:9000").inc()
    metrics.open_streams.set_function(lambda: 7)
    ttft = metrics.ttft_seconds.labels("demo-8b", "a")
    for value in (0.0005, 0.001, 0.0011, 5000.0):
        ttft.observe(value)
    page = samples(metrics.render())
    labels = {("model", "demo-8b"), ("endpoint", "a"), ("pool", "")}
    assert (
        page[
            "penstock_requests_total",
            frozenset({("model", "demo-8b"), ("code", "200"), ("reason", "ok"), ("pool", "")}),
        ]
        == 3
    )
    assert page["penstock_inflight", frozenset({("endpoint", "127.0.0.1:9000"), ("pool", "")})] == 1
    assert page["penstock_open_streams", frozenset()] == 7
    assert page["penstock_ttft_seconds_bucket", frozenset(labels | {("le", "0.001")})] == 2
    assert page["penstock_ttft_seconds_bucket", frozenset(labels | {("le", "0.005")})] == 3
    assert page["penstock_ttft_seconds_bucket", frozenset(labels | {("le", "+Inf")})] == 4
    assert page["penstock_ttft_seconds_count", frozenset(labels)] == 4
    assert page["penstock_ttft_seconds_sum", frozenset(labels)] == pytest.approx(5000.0026)


def test_every_family_of_the_catalogue_is_on_an_idle_page_with_its_type_and_help() -> None:
    metrics = Metrics()
    parsed = {
        family.name: family for family in text_string_to_metric_families(metrics.render().decode())
    }
    for spec in metrics.catalogue():
        family = parsed[spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name]
        assert (family.type, family.documentation) == (spec.kind, spec.help)


def test_the_process_has_the_metrics_and_names_of_every_prometheus_client() -> None:
    page = samples(Metrics().render())
    for name in (
        "cpu_seconds_total",
        "resident_memory_bytes",
        "open_fds",
        "max_fds",
        "start_time_seconds",
    ):
        assert page[f"process_{name}", frozenset()] > 0
    assert (
        page["process_virtual_memory_bytes", frozenset()]
        >= page["process_resident_memory_bytes", frozenset()]
    )


def test_names_carry_the_prefix_and_base_units() -> None:
    for spec in Metrics().catalogue():
        assert spec.name.startswith("penstock_")
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert not spec.buckets or spec.name.endswith(("_seconds", "_ratio"))


def test_ttft_has_the_22_buckets_of_vllm() -> None:
    assert len(TTFT_BUCKETS_S) == 22
    assert (TTFT_BUCKETS_S[0], TTFT_BUCKETS_S[-1]) == (0.001, 2560.0)


@given(st.lists(st.floats(0, 1e5), max_size=200))
def test_a_bucket_counts_exactly_the_values_at_or_below_its_bound(values: list[float]) -> None:
    histogram = Histogram(TTFT_BUCKETS_S)
    for value in values:
        histogram.observe(value)
    for bound, count in zip(
        (*TTFT_BUCKETS_S, math.inf), accumulate(histogram.snapshot().counts), strict=True
    ):
        assert count == sum(value <= bound for value in values)


def test_values_count_when_read_although_they_are_counted_in_batches() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in range(1, 3 * MAX_NEW):
        histogram.observe(1.5)
        assert histogram.counts == [0, number, 0]
        assert histogram.sum == 1.5 * number


def test_a_full_batch_counts_each_value_in_its_bucket_and_in_the_sum() -> None:
    histogram, values = Histogram((1.0, 2.0)), [2.5, 1.0, 0.5, 2.0, 1.5] * MAX_NEW
    for value in values:
        histogram.observe(value)
    assert histogram.snapshot().counts == [2 * MAX_NEW, 2 * MAX_NEW, MAX_NEW]
    assert histogram.sum == 7.5 * MAX_NEW


@given(st.lists(st.sampled_from([0.0, 1e-7, 1e-6, 0.001, 0.0011, 0.3, 2560.0, 3e3, 1e5, 1e6])))
def test_each_request_counts_in_the_sketch_and_the_bucket_of_its_value(values: list[float]) -> None:
    histogram = Histogram(TTFT_BUCKETS_S)
    for value in values:
        histogram.observe_request((value, 0.0, "req", ""))
    assert histogram.sketch == Counter(map(bucket_of, values))
    assert histogram.counts == [
        sum(low < value <= high for value in values)
        for low, high in pairwise((-1.0, *TTFT_BUCKETS_S, math.inf))
    ]


def test_label_values_beyond_the_cap_become_other_and_old_ones_stay() -> None:
    family = MetricRegistry().section("a row", "x.py").counter("x_total", "x", Label("model", 2))
    first = family.labels("a")
    family.labels("b")
    family.labels("c").inc()
    family.labels("d").inc()
    assert family.labels("a") is first
    assert {values: meter.value for values, meter in family.children()} == {
        ("a",): 0,
        ("b",): 0,
        (OTHER_VALUES,): 2,
    }


def test_a_removed_endpoint_leaves_no_series_and_frees_its_place() -> None:
    metrics = Metrics()
    metrics.inflight.labels("a").set(3)
    metrics.ttft_seconds.labels("m", "a").observe(1)
    run_at_once(metrics.remove_endpoints_steps(("a",)))
    assert b'endpoint="a"' not in metrics.render()


def test_a_wrong_number_of_label_values_is_rejected() -> None:
    family: MetricFamily[object] = Metrics().ttft_seconds  # type: ignore[assignment, type-var]
    with pytest.raises(ValueError, match="needs values for 2 labels, but 1 were given"):
        family.labels("m")


def test_two_metrics_objects_in_one_process_are_independent() -> None:
    one, other = Metrics(), Metrics()
    one.bytes_out_total.inc(5)
    assert samples(other.render())["penstock_bytes_out_total", frozenset()] == 0


def test_hostile_label_values_do_not_break_the_page() -> None:
    metrics = Metrics()
    metrics.shed_total.labels('a"\n\\b', "x").inc()
    assert (
        samples(metrics.render())[
            "penstock_shed_total", frozenset({("reason", 'a"\n\\b'), ("class", "x")})
        ]
        == 1
    )


def test_every_family_has_an_owner_a_row_and_a_merge_rule() -> None:
    for spec in Metrics().catalogue():
        assert (ROOT / "gateway" / spec.owner).is_file(), spec
        assert spec.row in set(Row), spec
        assert spec.kind == "gauge" or spec.merge is Merge.SUM, (
            f"{spec.name}: what is counted is added up"
        )
        assert not spec.has_exemplars or spec.kind == "histogram"


def test_series_of_endpoints_and_models_have_a_pool_label() -> None:
    metrics = Metrics()
    metrics.pool_by_label = lambda: {
        ("endpoint", "a"): "chat",
        ("prefill", "p"): "split",
        ("model", "m"): "code",
    }
    metrics.endpoint_up.labels("a").set(1)
    metrics.e2e_seconds.labels("m").observe(1)
    metrics.ttft_seconds.labels("m", "a").observe(1)
    metrics.split_pairs_total.labels("p", "d", "served").inc()
    metrics.waiting.labels("own").set(1)
    pools = {name: dict(labels).get("pool") for name, labels in samples(metrics.render())}
    assert pools["penstock_endpoint_up"] == "chat"
    assert pools["penstock_e2e_seconds_count"] == "code"
    assert pools["penstock_ttft_seconds_count"] == "chat", (
        "an endpoint is in one pool, a model may move"
    )
    assert pools["penstock_split_pairs_total"] == "split"
    assert pools["penstock_waiting"] == "own"
    assert pools["penstock_loop_lag_seconds_count"] is None


def test_a_gauge_whose_function_returns_none_is_not_exposed() -> None:
    metrics = Metrics()
    metrics.runtime_gauges.endpoint_kv_usage.labels("a").set_function(lambda: None)
    metrics.runtime_gauges.endpoint_kv_usage.labels("b").set_function(lambda: 0.25)
    matches = [
        value
        for (name, _), value in samples(metrics.render()).items()
        if name.endswith("kv_usage_ratio")
    ]
    assert matches == [0.25]


def test_a_bucket_stores_its_newest_request_as_an_openmetrics_exemplar() -> None:
    metrics = Metrics()
    ttft = metrics.ttft_seconds.labels("m", "a")
    ttft.observe_request((0.2, 10.0, "req_old", ""))
    ttft.observe_request((0.21, 11.0, "req_new", "4bf92f3577b34da6a3ce929d0e0e4736"))
    ttft.observe_request((9000.0, 12.0, "req_slow", ""))
    text = exposition.render_page(metrics.collect(0.0), exemplars=True).decode()
    families = {family.name: family for family in openmetrics(text)}
    shown = {
        sample.labels["le"]: sample.exemplar
        for sample in families["penstock_ttft_seconds"].samples
        if sample.exemplar
    }
    assert {bound: mark.labels["request_id"] for bound, mark in shown.items()} == {
        "0.25": "req_new",
        "+Inf": "req_slow",
    }
    assert shown["0.25"].labels["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert shown["0.25"].value == 0.21
    assert float(shown["+Inf"].timestamp) - float(shown["0.25"].timestamp) == pytest.approx(
        1.0, abs=0.01
    )
    assert b"req_" not in metrics.render()
    assert families.keys() >= {spec.name.removesuffix("_total") for spec in metrics.catalogue()}


@given(st.lists(st.floats(0, 1e5), max_size=500))
def test_exemplars_are_one_per_bucket_and_counted_like_observations(values: list[float]) -> None:
    marked, observed = Histogram(TTFT_BUCKETS_S), Histogram(TTFT_BUCKETS_S)
    for value in values:
        marked.observe_request((value, 0.0, "req", ""))
        observed.observe(value)
    assert (marked.counts, marked.sum) == (observed.counts, observed.sum)
    assert len(marked.exemplars) == (len(TTFT_BUCKETS_S) + 1 if values else 0)
