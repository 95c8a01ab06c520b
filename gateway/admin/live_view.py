"""The live view as one plain value: what the page, `penstock top` and a script see. docs/live-page.md names its parts.

Lives here: which numbers, over which span. Not here: notes and arithmetic (gateway/admin/metric_samples.py), what is told as it stands
(gateway/admin/fleet_status.py), pairs (gateway/admin/kv_flow.py), words (gateway/admin/diagnosis.py).
Rates are of the last ten seconds, percentiles and shares of the last minute. What nobody knows is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from types import MappingProxyType
from typing import Any

from gateway.admin import diagnosis
from gateway.admin.fleet_status import Standing
from gateway.admin.kv_flow import flow
from gateway.admin.metric_samples import Mark, Marks, Step, failed, rate, rise
from gateway.metrics.quantile_sketch import NONE, Counts, grown, merged, quantile, rounded

RATES_S, SHARES_S, SPARK_S = 10.0, 60.0, 60
SEVERITIES: Mapping[str, int] = MappingProxyType(
    {"dead": 5, "ejected": 5, "returning": 3, "draining": 2, "drained": 2, "leaving": 1}
)
IMPAIRED = 4
"""Severity of an endpoint that takes requests but is slow or silent."""


def view(standing: Standing, marks: Marks, now: Mark) -> dict[str, Any]:
    """Everything, as of `now`."""
    soon, minute = marks.before(now.at, RATES_S) or now, marks.before(now.at, SHARES_S) or now
    rows = _endpoints(standing, marks, now, minute)
    findings = diagnosis.findings(_minute(standing, now, minute, rows))
    impaired = {each.endpoint for each in findings if each.grade == "warn"}
    return {
        "at": round(time(), 3),
        "span_s": {"rates": round(now.at - soon.at, 3), "shares": round(now.at - minute.at, 3)},
        "config": standing.config,
        "totals": _totals(standing, now, soon, minute),
        "pools": standing.pools,
        "endpoints": [row | {"severity": severity(row["state"], row["name"] in impaired)} for row in rows],
        "flow": flow(standing, now, soon),
        "why": [_reason(each) for each in diagnosis.shortened(findings)],
        "history": _history(marks.steps(now), now.at),
    }


def severity(state: str, is_impaired: bool) -> int:
    """How broken an endpoint is: 5 out, 4 slow or silent, 3 on trial after it was out, 2 drained, 1 leaving, 0 well."""
    return SEVERITIES.get(state, IMPAIRED if is_impaired else 0)


def _reason(reason: diagnosis.Reason) -> dict[str, Any]:
    return {"grade": reason.grade, "text": reason.text, "endpoint": reason.endpoint}


def _totals(standing: Standing, now: Mark, soon: Mark, minute: Mark) -> dict[str, Any]:
    ttft_s, tpot_s = standing.promises[standing.standard]
    answers, per_s = rise(now.answers, soon.answers), rate(now, soon)
    sent, hit = _believed(now, minute, now.believed)
    prompt, cached = (new - old for new, old in zip(now.engine, minute.engine, strict=True))
    return {
        "requests_per_s": per_s(sum(answers.values())),
        "errors_per_s": per_s(failed(answers)),
        "tokens_per_s": per_s(now.tokens - soon.tokens),
        "shed_per_s": {reason: per_s(count) for reason, count in rise(now.shed, soon.shed).most_common()},
        "streams": standing.streams,
        "waiting": sum(pool["waiting"] for pool in standing.pools),
        "goodput": _goodput(standing, now, minute),
        "ttft": _percentiles(now.ttft, minute.ttft, ttft_s),
        "tpot": _percentiles(now.tpot, minute.tpot, tpot_s),
        "slo": standing.standard,
        "prefix_hit": _ratio(hit, sent),
        "engine_hit": _ratio(cached, prompt),
        "since_start": {
            "requests": int(sum(now.answers.values())),
            "failed": int(failed(now.answers)),
            "refused": int(sum(now.shed.values())),
            "retries": int(sum(now.retries.values())),
        },
    }


def _goodput(standing: Standing, now: Mark, minute: Mark) -> list[dict[str, Any]]:
    """By service class; a class that had no request is left out."""
    ended = rise(now.kept, minute.kept)
    shown = []
    for name in sorted({key[0] for key in ended}):
        outcomes = {kept: count for (each, kept), count in ended.items() if each == name}
        ttft_s, tpot_s = standing.promises.get(name, (None, None))
        shown.append(
            {
                "class": name,
                "ratio": _ratio(outcomes.get("met", 0.0), sum(outcomes.values())),
                "outcomes": outcomes,
                "ttft_s": ttft_s,
                "tpot_s": tpot_s,
            }
        )
    return shown


def _endpoints(standing: Standing, marks: Marks, now: Mark, minute: Mark) -> list[dict[str, Any]]:
    sparks = _sparks([*marks, now], now.at)
    return [
        row | _minute_of(row["name"], now, minute) | {"spark": sparks.get(row["name"], [])}
        for row in standing.endpoints
    ]


def _minute_of(name: str, now: Mark, minute: Mark) -> dict[str, Any]:
    ttft = grown(now.ttft.get(name, NONE), minute.ttft.get(name, NONE))
    tpot = grown(now.tpot.get(name, NONE), minute.tpot.get(name, NONE))
    sent, hit = _believed(now, minute, (name,))
    return {
        "hit": _ratio(hit, sent),
        "served": sum(ttft.values()),
        "ttft_p50_s": rounded(quantile(ttft, 0.5)),
        "ttft_p95_s": rounded(quantile(ttft, 0.95)),
        "tpot_p50_s": rounded(quantile(tpot, 0.5)),
        "tpot_p95_s": rounded(quantile(tpot, 0.95)),
    }


def _sparks(marks: Sequence[Mark], now: float) -> dict[str, list[int]]:
    """Requests in flight, a number for each second of the last minute; what was not noted repeats what was."""
    moments: list[Mark | None] = [None] * SPARK_S
    for mark in marks:
        at = SPARK_S - 1 - int(now - mark.at)
        if 0 <= at < SPARK_S:
            moments[at] = mark
    found: dict[str, list[int]] = {name: [] for name in marks[-1].in_flight}
    last: Mark | None = None
    for moment in moments:
        last = moment or last
        for name, line in found.items():
            line.append(0 if last is None else last.in_flight.get(name, 0))
    return found


def _minute(standing: Standing, now: Mark, minute: Mark, endpoints: Sequence[Mapping[str, Any]]) -> diagnosis.Minute:
    ended, decisions = rise(now.kept, minute.kept), rise(now.decisions, minute.decisions)
    missed: dict[str, float] = {}
    for (_, kept), count in ended.items():
        missed[kept] = missed.get(kept, 0.0) + count
    return diagnosis.Minute(
        endpoints=endpoints,
        span_s=now.at - minute.at,
        shed=rise(now.shed, minute.shed),
        retries=rise(now.retries, minute.retries),
        missed=missed,
        promised=sum(missed.values()),
        computed=rise(now.computed, minute.computed),
        whole={reason: count for (kind, reason), count in decisions.items() if kind == "whole"},
        split=sum(count for (kind, _), count in decisions.items() if kind == "split"),
        prices={pool["name"]: pool["price"] for pool in standing.pools},
        waiting={pool["name"]: pool["waiting"] for pool in standing.pools},
        refused=standing.refused,
        unlisted=sorted(set(standing.unlisted.values())),
        shared_problem=None if standing.shared is None else standing.shared["problem"] or None,
    )


def _history(steps: Sequence[Step], now: float) -> dict[str, list[float | None]]:
    """Lines for charts; `ago_s` says where on them, in seconds, negative."""
    return {
        "ago_s": [round(each.at - now, 2) for each in steps],
        "requests_per_s": [round(each.requests_per_s, 2) for each in steps],
        "shed_per_s": [round(each.shed_per_s, 2) for each in steps],
        "errors_per_s": [round(each.errors_per_s, 2) for each in steps],
        "tokens_per_s": [round(each.tokens_per_s, 1) for each in steps],
        "ttft_p95_s": [rounded(each.ttft_p95_s) for each in steps],
    }


def _percentiles(now: Mapping[str, Counts], before: Mapping[str, Counts], budget_s: float) -> dict[str, Any]:
    counts = merged([grown(found, before.get(name, NONE)) for name, found in now.items()])
    shown: dict[str, Any] = {f"p{share}_s": rounded(quantile(counts, share / 100)) for share in (50, 95, 99)}
    return shown | {"budget_s": budget_s, "count": sum(counts.values())}


def _believed(now: Mark, minute: Mark, names: Sequence[str] | Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens sent to these endpoints since then, and those of them believed to be cached."""
    sent = hit = 0
    for name in names:
        after, before = now.believed.get(name, (0, 0)), minute.believed.get(name, (0, 0))
        sent += max(0, after[0] - before[0])
        hit += max(0, after[1] - before[1])
    return sent, hit


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
