"""Tests of the results of `penstock bench`, also in the formats of other tools."""

from __future__ import annotations

import pytest

from planner.bench import BenchPlan, BenchRecord, BenchReport, BenchSlo, is_good


def record(
    due_s: float = 0.0,
    ttft_s: float = 0.1,
    gaps: tuple[float, ...] = (0.02, 0.04),
    **fields: object,
) -> BenchRecord:
    first_s = due_s + ttft_s
    last_s = first_s + sum(gaps)
    filled = BenchRecord(
        0, 0, due_s, due_s, last_s, first_s, last_s, list(gaps), 100, len(gaps) + 1, 25, 200
    )
    for name, value in fields.items():
        setattr(filled, name, value)
    return filled


def report(*records: BenchRecord, slo: BenchSlo | None = None) -> BenchReport:
    return BenchReport(
        BenchPlan(url="http://x", model="m", concurrency=1, slo=slo or BenchSlo(), api_key="sk-1"),
        records,
        peak=2,
    )


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    late = record(due_s=1.0, sent_s=1.5)
    assert late.ttft_s == pytest.approx(0.1)
    assert late.lag_s == 0.5
    assert late.e2e_s == pytest.approx(0.16)


def test_tpot_is_the_time_per_token_after_the_first() -> None:
    assert record().tpot_s == pytest.approx(0.03)
    assert record(gaps=()).tpot_s is None


def test_a_request_is_good_within_every_bound_given_and_never_with_an_error() -> None:
    assert is_good(record(), BenchSlo())
    assert is_good(record(), BenchSlo(0.2, 0.05))
    assert not is_good(record(), BenchSlo(ttft_s=0.05))
    assert not is_good(record(), BenchSlo(tpot_s=0.02))
    assert is_good(record(gaps=()), BenchSlo(tpot_s=0.001)), (
        "one token has no time per further token"
    )
    assert not is_good(record(error="disconnected"), BenchSlo())


def test_goodput_counts_failures_against_the_fraction_and_errors_by_kind() -> None:
    summary = report(
        record(),
        record(due_s=1.0),
        record(error="http_429"),
        record(error="http_429"),
        slo=BenchSlo(ttft_s=1.0),
    )
    assert summary.errors == {"http_429": 2}
    assert summary.good_fraction == 0.5
    assert summary.per_second(summary.good) == pytest.approx(2 / 1.16)


def test_the_cached_ratio_is_by_tokens_and_absent_if_not_reported() -> None:
    assert (
        report(record(), record(cached_tokens=75), record(cached_tokens=None)).cached_ratio == 0.5
    )
    assert report(record(cached_tokens=None)).cached_ratio is None


def test_the_json_speaks_the_names_of_vllm_guidellm_and_aiperf() -> None:
    summary = report(record(), record(due_s=0.5, ttft_s=0.3)).as_json()
    for metric in ("ttft", "tpot", "itl", "e2el", "e2e_latency"):
        for statistic in ("mean", "std", "median", "p90", "p95", "p99"):
            assert summary[f"{statistic}_{metric}_ms"] > 0 or statistic == "std"
    assert summary["mean_ttft_ms"] == pytest.approx(200.0)
    assert summary["completed"] == 2
    assert summary["request_throughput"] == summary["aiperf"]["request_throughput"]["avg"]
    assert summary["guidellm"]["time_to_first_token_ms"]["mean"] == pytest.approx(200.0)
    assert summary["guidellm"]["time_per_output_token_ms"]["mean"] == pytest.approx(
        (160 + 360) / 2 / 3
    )
    assert summary["aiperf"]["inter_token_latency"] == summary["aiperf"]["inter_token_latency"] | {
        "unit": "ms"
    }
    assert summary["aiperf"]["inter_token_latency"]["avg"] == pytest.approx(30.0)
    assert {
        "output_token_throughput",
        "request_latency",
        "goodput",
        "good_request_fraction",
    } <= summary["aiperf"].keys()


def test_a_key_never_reaches_the_json() -> None:
    assert "sk-1" not in str(report(record()).as_json())


def test_a_run_without_answers_reports_nothing_rather_than_zeros() -> None:
    summary = report(record(error="connect")).as_json()
    assert summary["mean_ttft_ms"] is None
    assert summary["completed"] == 0
    assert summary["failed"] == 1
