"""Several workers' pages made one: metrics by the rule that the catalogue gives each, endpoints and trials by name.

Shares and means are made of all requests, never of the workers' shares. Not here: the live view (gateway/workers/live_view_merge.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from operator import add
from typing import Any

from gateway.metrics.metric_types import Buckets, Mark, Merge, Reading
from gateway.metrics.quantile_sketch import Counts
from gateway.trials.canary import figures
from gateway.trials.shadow import MIN_COMPARED, RESULTS

SUMMED = ("in_flight", "connections")


def readings(pages: Iterable[Iterable[Reading]], gone: Iterable[Iterable[Reading]] = ()) -> list[Reading]:
    """All pages as one. Counters and histograms are summed, gauges merged by the rule of their spec; of the pages of
    workers that are `gone` only counters and histograms."""
    found: dict[str, Reading] = {}
    counted = (each for page in gone for each in page if each.spec.kind != "gauge")
    for reading in chain(chain.from_iterable(pages), counted):
        one = found.get(reading.spec.name)
        if one is None:
            found[reading.spec.name] = Reading(reading.spec, reading.values.copy())
        elif one.spec.buckets == reading.spec.buckets:
            _add(one, reading)
    return list(found.values())


def _add(one: Reading, other: Reading) -> None:
    for labels, value in other.values.items():
        before = one.values.get(labels)
        if before is None:
            one.values[labels] = value
        elif isinstance(before, Buckets) and isinstance(value, Buckets):
            one.values[labels] = _summed(before, value)
        elif not isinstance(before, Buckets) and not isinstance(value, Buckets):
            one.values[labels] = _one(one.spec.merge, before, value)


def _summed(one: Buckets, other: Buckets) -> Buckets:
    """The observations of both; of each bucket the newer request."""
    counts = list(map(add, one.counts, other.counts))
    marks = [max(filter(None, pair), key=_time, default=None) for pair in zip_longest(one.marks, other.marks)]
    return Buckets(counts, one.sum + other.sum, marks)


def _time(mark: Mark) -> float:
    return mark[1]


def _one(rule: Merge, one: float, other: float) -> float:
    match rule:
        case Merge.SUM:
            return one + other
        case Merge.MAX:
            return max(one, other)
        case Merge.MIN:
            return min(one, other)
        case Merge.LAST:
            return other


def endpoints(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Every endpoint once. What each worker has of it is summed; it is available when all say so."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for page in pages:
        rest = rest or {key: value for key, value in page.items() if key != "endpoints"}
        for each in page["endpoints"]:
            key = each["pool"], each["url"]
            one = found.get(key)
            if one is None:
                found[key] = dict(each) | {"in_flight_elsewhere": 0}
                continue
            for name in SUMMED:
                one[name] += each[name]
            if one["available"] and not each["available"]:
                one |= {name: each[name] for name in ("available", "state", "cause", "slow", "back_in_s")}
    return {"endpoints": list(found.values())} | rest


def shadows(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What every pool's shadows came to. What is a mean is weighed by what it is a mean of."""
    return {"shadows": [_shadows(told) for told in _by("pool", (each for page in pages for each in page["shadows"]))]}


def _shadows(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    picks_us = [each["picks"] * (each["pick_us"] or 0.0) for each in told]
    return {
        "pool": told[0]["pool"],
        "picks": sum(each["picks"] for each in told),
        "scored": sum(each["scored"] for each in told),
        "pick_us": _mean(told, "pick_us", [each["picks"] for each in told], 2),
        "cost_share": _mean(told, "cost_share", picks_us, 4),
        "policies": [_shadow(each) for each in _by("policy", (one for pool in told for one in pool["policies"]))],
    }


def _shadow(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {result: sum(each.get(result, 0) for each in told) for result in RESULTS}
    answered = [each.get("agreed", 0) + each.get("differed", 0) for each in told]
    scored = [sum(each.get(result, 0) for result in RESULTS) for each in told]
    return {
        "policy": told[0]["policy"],
        **counts,
        "conclusive": sum(answered) >= MIN_COMPARED,
        "agreement": round(counts["agreed"] / sum(answered), 4) if sum(answered) else None,
        "ttft_gain_s": _mean(told, "ttft_gain_s", answered, 6),
        "cached_tokens_gain": _mean(told, "cached_tokens_gain", answered, 1),
        "cost_us": _mean(told, "cost_us", scored, 2),
    }


def canaries(pages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Both sides of every pool that has a canary, with all workers' requests."""
    return {"canaries": [_canary(told) for told in _by("pool", (each for page in pages for each in page["canaries"]))]}


def _canary(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sides = [
        figures(each[0]["side"], each[0]["policy"], _added(each, "outcomes"), _sketch(each))
        for each in _by("side", (side for pool in told for side in pool["sides"]))
    ]
    return {"pool": told[0]["pool"], "share": told[0]["share"], "sides": sides}


def _sketch(told: Iterable[Mapping[str, Any]]) -> Counts:
    return {int(bucket): count for bucket, count in _added(told, "ttft_sketch").items()}


def _added(told: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in told:
        for key, count in each[name].items():
            total[key] = total.get(key, 0) + count
    return total


def _by(name: str, rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows that have this in common, in the order in which they were first told of."""
    found: dict[object, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return list(found.values())


def _mean(rows: Sequence[Mapping[str, Any]], name: str, weights: Sequence[float], digits: int) -> float | None:
    known = [(row[name], weight) for row, weight in zip(rows, weights, strict=True) if row.get(name) is not None]
    whole = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / whole, digits) if whole else None
