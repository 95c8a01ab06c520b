"""Merges the admin pages of several workers: metrics, endpoints, and policies on trial.

A ratio or mean is computed over all requests, never as a mean of the workers' values.
live_view_merge.py merges the live view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from operator import add
from typing import Any

from gateway.metrics.labels import ENDPOINT_LABELS
from gateway.metrics.metric_types import (
    OTHER_VALUES,
    FamilyReading,
    FamilySpec,
    HistogramValue,
    Merge,
    RequestExemplar,
)
from gateway.metrics.quantile_sketch import BucketCounts
from gateway.metrics.runtime_gauges import ENDPOINT_STATE
from gateway.trials.canary import summarize_arm
from gateway.trials.shadow import MIN_COMPARED, RESULTS

SUMMED_FIELDS = ("in_flight", "connections")


def merge_families(
    pages: Iterable[Iterable[FamilyReading]], ended: Iterable[Iterable[FamilyReading]] = ()
) -> list[FamilyReading]:
    """Merge the metric families of several workers by name.

    Counters and histograms are summed, gauges follow the merge rule of their specification. Of
    `ended` workers only counters and histograms count.
    """
    merged: dict[str, FamilyReading] = {}
    without_gauges = (reading for page in ended for reading in page if reading.spec.kind != "gauge")
    for reading in chain(chain.from_iterable(pages), without_gauges):
        existing = merged.get(reading.spec.name)
        if existing is None:
            merged[reading.spec.name] = FamilyReading(reading.spec, reading.values.copy())
        elif existing.spec.buckets == reading.spec.buckets:
            _add(existing, reading)
    return list(merged.values())


def without_removed_endpoints(
    readings: Iterable[FamilyReading], pages: Sequence[Iterable[FamilyReading]]
) -> list[FamilyReading]:
    """Return the readings without the series of endpoints that no worker has any more.

    readings  the metric families of ended workers
    pages     the families of all workers that respond; without any, nothing is left out

    A process drops these series when a reload removes an endpoint. Those of ended workers would
    stay for as long as the supervisor lives, which runs for weeks while endpoints come and go.
    """
    known = {
        value
        for page in pages
        for reading in page
        if reading.spec.name == ENDPOINT_STATE
        for value in _endpoints_of(reading.spec, reading.values)
    }
    if not known:
        return list(readings)
    known.add(OTHER_VALUES)
    return [
        FamilyReading(
            reading.spec,
            {
                labels: value
                for labels, value in reading.values.items()
                if known.issuperset(_endpoints_of(reading.spec, (labels,)))
            },
        )
        for reading in readings
    ]


def _endpoints_of(spec: FamilySpec, series: Iterable[tuple[str, ...]]) -> Iterator[str]:
    # Yield the names of endpoints among the series' label values.
    indexes = [at for at, label in enumerate(spec.labels) if label in ENDPOINT_LABELS]
    return (labels[at] for labels in series for at in indexes)


def _add(merged: FamilyReading, other: FamilyReading) -> None:
    for labels, value in other.values.items():
        before = merged.values.get(labels)
        if before is None:
            merged.values[labels] = value
        elif isinstance(before, HistogramValue) and isinstance(value, HistogramValue):
            merged.values[labels] = _sum_histograms(before, value)
        elif not isinstance(before, HistogramValue) and not isinstance(value, HistogramValue):
            merged.values[labels] = _merge_gauge(merged.spec.merge, before, value)


def _sum_histograms(first: HistogramValue, second: HistogramValue) -> HistogramValue:
    # Return the sum of two histograms; each bucket keeps the newer exemplar.
    counts = list(map(add, first.counts, second.counts))
    marks = [
        max(filter(None, pair), key=_time, default=None)
        for pair in zip_longest(first.exemplars, second.exemplars)
    ]
    return HistogramValue(counts, first.sum + second.sum, marks)


def _time(mark: RequestExemplar) -> float:
    return mark[1]


def _merge_gauge(rule: Merge, first: float, second: float) -> float:
    match rule:
        case Merge.SUM:
            return first + second
        case Merge.MAX:
            return max(first, second)
        case Merge.MIN:
            return min(first, second)
        case Merge.LAST:
            return second


def merge_endpoints(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the endpoints of several workers by pool and URL.

    The fields of SUMMED_FIELDS are summed; an endpoint is available if all workers report it as
    available, and an available one is slow if any worker reports it as slow.
    """
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    other_members: dict[str, Any] = {}
    for page in pages:
        other_members = other_members or {
            key: value for key, value in page.items() if key != "endpoints"
        }
        for row in page["endpoints"]:
            key = row["pool"], row["url"]
            existing = merged.get(key)
            if existing is None:
                merged[key] = dict(row) | {"in_flight_elsewhere": 0}
                continue
            for name in SUMMED_FIELDS:
                existing[name] += row[name]
            if existing["available"] and not row["available"]:
                existing |= {
                    name: row[name] for name in ("available", "state", "cause", "slow", "back_in_s")
                }
            elif existing["available"]:
                existing["slow"] = existing["slow"] or row["slow"]
    return {"endpoints": list(merged.values())} | other_members


def merge_shadows(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the workers' results of shadow policies in every pool.

    Means are weighted by their observations.
    """
    return {
        "shadows": [
            _shadows(rows)
            for rows in _group_by("pool", (row for page in pages for row in page["shadows"]))
        ]
    }


def _shadows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    picks_us = [row["picks"] * (row["pick_us"] or 0.0) for row in rows]
    return {
        "pool": rows[0]["pool"],
        "picks": sum(row["picks"] for row in rows),
        "scored": sum(row["scored"] for row in rows),
        "pick_us": _mean(rows, "pick_us", [row["picks"] for row in rows], 2),
        "cost_share": _mean(rows, "cost_share", picks_us, 4),
        "policies": [
            _shadow(rows_of_policy)
            for rows_of_policy in _group_by(
                "policy", (one for pool in rows for one in pool["policies"])
            )
        ],
    }


def _shadow(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {result: sum(row.get(result, 0) for row in rows) for result in RESULTS}
    compared = [row.get("agreed", 0) + row.get("differed", 0) for row in rows]
    scored = [sum(row.get(result, 0) for result in RESULTS) for row in rows]
    return {
        "policy": rows[0]["policy"],
        **counts,
        "conclusive": sum(compared) >= MIN_COMPARED,
        "agreement": round(counts["agreed"] / sum(compared), 4) if sum(compared) else None,
        "ttft_gain_s": _mean(rows, "ttft_gain_s", compared, 6),
        "cached_tokens_gain": _mean(rows, "cached_tokens_gain", compared, 1),
        "cost_us": _mean(rows, "cost_us", scored, 2),
    }


def merge_mirrors(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mirrors of the only worker that has mirrors."""
    return {"mirrors": [row for page in pages for row in page["mirrors"]]}


def merge_canaries(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the workers' pages about canaries: per pool, the requests of each arm are added up."""
    return {
        "canaries": [
            _canary(rows)
            for rows in _group_by("pool", (row for page in pages for row in page["canaries"]))
        ]
    }


def _canary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arms = [
        summarize_arm(
            rows_of_arm[0]["arm"],
            rows_of_arm[0]["policy"],
            _sum_counts(rows_of_arm, "outcomes"),
            _sketch(rows_of_arm),
        )
        for rows_of_arm in _group_by("arm", (arm for pool in rows for arm in pool["arms"]))
    ]
    return {"pool": rows[0]["pool"], "share": rows[0]["share"], "arms": arms}


def _sketch(rows: Iterable[Mapping[str, Any]]) -> BucketCounts:
    return {int(bucket): count for bucket, count in _sum_counts(rows, "ttft_sketch").items()}


def _sum_counts(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for key, count in row[name].items():
            total[key] = total.get(key, 0) + count
    return total


def _group_by(name: str, rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    # Group rows by the value of one member; groups are in order of first appearance.
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return list(groups.values())


def _mean(
    rows: Sequence[Mapping[str, Any]], name: str, weights: Sequence[float], digits: int
) -> float | None:
    weighted = [
        (row[name], weight)
        for row, weight in zip(rows, weights, strict=True)
        if row.get(name) is not None
    ]
    total_weight = sum(weight for _, weight in weighted)
    return (
        round(sum(value * weight for value, weight in weighted) / total_weight, digits)
        if total_weight
        else None
    )
