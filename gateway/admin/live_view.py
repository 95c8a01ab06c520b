"""Builds the live view's JSON from metric samples and status: totals, endpoints, goodput, costs.

Rates cover the last ten seconds; percentiles and ratios cover the last minute. Unknown values are
None.

- live_metric_samples.py has the samples of the metrics.
- live_fleet_status.py has the state of the endpoints.
- live_kv_flow.py has the KV transfers.
- live_diagnosis.py has the sentences about problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from types import MappingProxyType
from typing import Any

from gateway.admin import live_diagnosis
from gateway.admin.live_fleet_status import FleetStatus
from gateway.admin.live_kv_flow import kv_flow
from gateway.admin.live_metric_samples import (
    MetricSample,
    SampleDifference,
    SampleHistory,
    SketchGrowth,
    count_failed,
    counter_growth,
    rate_function,
)
from gateway.metrics.quantile_sketch import (
    EMPTY,
    BucketCounts,
    merge_counts,
    quantile,
    round_seconds,
)

RATES_S, SHARES_S, SPARK_S = 10.0, 60.0, 60
SEVERITIES: Mapping[str, int] = MappingProxyType(
    {"dead": 5, "ejected": 5, "returning": 3, "draining": 2, "drained": 2, "leaving": 1}
)
IMPAIRED = 4
"""Severity of an endpoint that is slow or silent but still takes requests.

It applies unless the endpoint's state has a higher one (SEVERITIES)."""


def build_view(status: FleetStatus, history: SampleHistory, now: MetricSample) -> dict[str, Any]:
    """Return the live view at the time of the metric sample `now`, as one JSON-compatible value."""
    recent = history.find_before(now.at, RATES_S) or now
    minute = history.find_before(now.at, SHARES_S) or now
    growth = history.growth_since(minute, now)
    rows = _endpoints(status, history, now, minute, growth)
    findings = live_diagnosis.diagnose(_minute(status, now, minute, rows))
    impaired = {finding.endpoint for finding in findings if finding.grade == "warn"}
    return {
        "at": round(time(), 3),
        "span_s": {"rates": round(now.at - recent.at, 3), "shares": round(now.at - minute.at, 3)},
        "config": status.config,
        "totals": _totals(status, now, recent, minute, growth),
        "costs": _costs(now, minute),
        "pools": status.pools,
        "endpoints": [
            row | {"severity": endpoint_severity(row["state"], row["name"] in impaired)}
            for row in rows
        ],
        "flow": kv_flow(status, now, recent),
        "why": [_reason(finding) for finding in live_diagnosis.shorten(findings)],
        "history": _history(history.differences(now), now.at),
    }


def endpoint_severity(state: str, is_impaired: bool) -> int:
    """Return how impaired an endpoint is, from 0 (healthy) to 5.

    5  out of rotation: ejected or dead
    4  in rotation, but slow or silent (`is_impaired`)
    3  returning to rotation after an ejection, with few requests at first
    2  drained by an operator
    1  leaving: it is no longer in the configuration
    0  healthy
    """
    return SEVERITIES.get(state, IMPAIRED if is_impaired else 0)


def _reason(reason: live_diagnosis.DiagnosisLine) -> dict[str, Any]:
    return {"grade": reason.grade, "text": reason.text, "endpoint": reason.endpoint}


def _totals(
    status: FleetStatus,
    now: MetricSample,
    recent: MetricSample,
    minute: MetricSample,
    growth: SketchGrowth,
) -> dict[str, Any]:
    ttft_s, tpot_s = status.slo_by_class[status.default_class]
    responses, per_s = counter_growth(now.responses, recent.responses), rate_function(now, recent)
    sent, hit = _believed(now, minute, now.predicted_tokens)
    prompt, cached = (new - old for new, old in zip(now.engine, minute.engine, strict=True))
    return {
        "requests_per_s": per_s(sum(responses.values())),
        "errors_per_s": per_s(count_failed(responses)),
        "tokens_per_s": per_s(now.tokens - recent.tokens),
        "shed_per_s": {
            reason: per_s(count)
            for reason, count in counter_growth(now.shed, recent.shed).most_common()
        },
        "streams": status.active_requests,
        "waiting": sum(pool["waiting"] for pool in status.pools),
        "goodput": _goodput(status, now, minute),
        "ttft": _percentiles(growth.ttft, ttft_s),
        "tpot": _percentiles(growth.tpot, tpot_s),
        "slo": status.default_class,
        "prefix_hit": _ratio(hit, sent),
        "engine_hit": _ratio(cached, prompt),
        "since_start": {
            "requests": int(sum(now.responses.values())),
            "failed": int(count_failed(now.responses)),
            "refused": int(sum(now.shed.values())),
            "retries": int(sum(now.retries.values())),
        },
    }


def _costs(now: MetricSample, minute: MetricSample) -> list[dict[str, Any]]:
    per_s = rate_function(now, minute)
    rows = [
        {
            "kind": kind,
            "name": name,
            "usd_per_hour": 3600 * per_s(usd - minute.costs.get((kind, name), 0.0)),
            "usd": usd,
        }
        for (kind, name), usd in now.costs.items()
    ]
    return sorted(rows, key=lambda row: -row["usd_per_hour"])


def _goodput(status: FleetStatus, now: MetricSample, minute: MetricSample) -> list[dict[str, Any]]:
    # Return the SLO outcomes by service class, without classes that had no request.
    ended = counter_growth(now.slo_outcomes, minute.slo_outcomes)
    rows = []
    for name in sorted({key[0] for key in ended}):
        outcomes = {
            outcome: count for (class_name, outcome), count in ended.items() if class_name == name
        }
        ttft_s, tpot_s = status.slo_by_class.get(name, (None, None))
        rows.append(
            {
                "class": name,
                "ratio": _ratio(outcomes.get("met", 0.0), sum(outcomes.values())),
                "outcomes": outcomes,
                "ttft_s": ttft_s,
                "tpot_s": tpot_s,
            }
        )
    return rows


def _endpoints(
    status: FleetStatus,
    history: SampleHistory,
    now: MetricSample,
    minute: MetricSample,
    growth: SketchGrowth,
) -> list[dict[str, Any]]:
    sparks = _sparks([*history, now], now.at)
    return [
        row | _latency_of(row["name"], now, minute, growth) | {"spark": sparks.get(row["name"], [])}
        for row in status.endpoints
    ]


def _latency_of(
    name: str, now: MetricSample, minute: MetricSample, growth: SketchGrowth
) -> dict[str, Any]:
    ttft, tpot = growth.ttft.get(name, EMPTY), growth.tpot.get(name, EMPTY)
    sent, hit = _believed(now, minute, (name,))
    return {
        "hit": _ratio(hit, sent),
        "served": sum(ttft.values()),
        "ttft_p50_s": round_seconds(quantile(ttft, 0.5)),
        "ttft_p95_s": round_seconds(quantile(ttft, 0.95)),
        "tpot_p50_s": round_seconds(quantile(tpot, 0.5)),
        "tpot_p95_s": round_seconds(quantile(tpot, 0.95)),
    }


def _sparks(history: Sequence[MetricSample], now: float) -> dict[str, list[int]]:
    # Return the requests in flight of each endpoint, one number per second of the last minute.
    #
    # A second without a sample gets the number of the second before.
    moments: list[MetricSample | None] = [None] * SPARK_S
    for mark in history:
        index = SPARK_S - 1 - int(now - mark.at)
        if 0 <= index < SPARK_S:
            moments[index] = mark
    series: dict[str, list[int]] = {name: [] for name in history[-1].in_flight}
    latest: MetricSample | None = None
    for moment in moments:
        latest = moment or latest
        for name, values in series.items():
            values.append(0 if latest is None else latest.in_flight.get(name, 0))
    return series


def _minute(
    status: FleetStatus,
    now: MetricSample,
    minute: MetricSample,
    endpoints: Sequence[Mapping[str, Any]],
) -> live_diagnosis.MinuteCounts:
    ended = counter_growth(now.slo_outcomes, minute.slo_outcomes)
    decisions = counter_growth(now.split_decisions, minute.split_decisions)
    missed: dict[str, float] = {}
    for (_, outcome), count in ended.items():
        missed[outcome] = missed.get(outcome, 0.0) + count
    return live_diagnosis.MinuteCounts(
        endpoints=endpoints,
        span_s=now.at - minute.at,
        shed=counter_growth(now.shed, minute.shed),
        retries=counter_growth(now.retries, minute.retries),
        missed=missed,
        slo_requests=sum(missed.values()),
        computed_tokens=counter_growth(now.computed_tokens, minute.computed_tokens),
        whole_reasons={
            reason: count for (kind, reason), count in decisions.items() if kind == "whole"
        },
        split_count=sum(count for (kind, _), count in decisions.items() if kind == "split"),
        prices={pool["name"]: pool["price"] for pool in status.pools},
        waiting={pool["name"]: pool["waiting"] for pool in status.pools},
        config_problem=status.config_problem,
        unlisted=sorted(set(status.unlisted.values())),
        drift=status.drift,
        shared_problem=(status.shared_state or {}).get("problem") or None,
    )


def _history(steps: Sequence[SampleDifference], now: float) -> dict[str, list[float | None]]:
    # Return the series of the charts; `ago_s` is the time of each point in seconds, negative.
    return {
        "ago_s": [round(difference.at - now, 2) for difference in steps],
        "requests_per_s": [round(difference.requests_per_s, 2) for difference in steps],
        "shed_per_s": [round(difference.shed_per_s, 2) for difference in steps],
        "errors_per_s": [round(difference.errors_per_s, 2) for difference in steps],
        "tokens_per_s": [round(difference.tokens_per_s, 1) for difference in steps],
        "ttft_p95_s": [round_seconds(difference.ttft_p95_s) for difference in steps],
    }


def _percentiles(growth: Mapping[str, BucketCounts], budget_s: float) -> dict[str, Any]:
    counts = merge_counts(growth.values())
    shown: dict[str, Any] = {
        f"p{share}_s": round_seconds(quantile(counts, share / 100)) for share in (50, 95, 99)
    }
    return shown | {"budget_s": budget_s, "count": sum(counts.values())}


def _believed(
    now: MetricSample, minute: MetricSample, names: Sequence[str] | Mapping[str, Any]
) -> tuple[int, int]:
    sent = hit = 0
    for name in names:
        after = now.predicted_tokens.get(name, (0, 0))
        before = minute.predicted_tokens.get(name, (0, 0))
        sent += max(0, after[0] - before[0])
        hit += max(0, after[1] - before[1])
    return sent, hit


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
