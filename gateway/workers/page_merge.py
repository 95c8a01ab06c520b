"""Merges the contents of /endpoints, /shadow, /canary and /mirror from several workers.

Ratios and means are computed over all requests, not from the workers' ratios. metrics_merge.py
merges metrics, and live_view_merge.py merges the live view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.metrics.quantile_sketch import BucketCounts
from gateway.trials.canary import summarize_arm
from gateway.trials.shadow import MIN_COMPARED, RESULTS

SUMMED_FIELDS = ("in_flight", "connections")


def merge_endpoints(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the endpoints of several workers by pool and URL.

    The fields in SUMMED_FIELDS are summed. An endpoint is available if all workers report it as
    available. An available one is slow if any worker reports it as slow.
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
    """Merge the workers' results of shadow policies, whose picks have no effect, by pool.

    Means are weighted by their numbers of observations.
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
    """Return the results of mirrors (comparisons with candidate engines) from the workers' pages.

    Only one of the workers has mirrors.
    """
    return {"mirrors": [row for page in pages for row in page["mirrors"]]}


def merge_canaries(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the workers' pages about canaries: sum the requests per pool and policy."""
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
