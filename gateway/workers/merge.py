"""Several workers' pages made one: metrics by the rule that the catalogue gives each, endpoints and trials by name.

Shares and means are made of all requests, never of the workers' shares. Not here: the live view (watch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.canary import figures
from gateway.meters import Merge
from gateway.shadow import MIN_COMPARED, RESULTS
from gateway.sketch import Counts

SUMMED = ("in_flight", "connections")
EARLIEST = "process_start_time_seconds"

Series = tuple[str, tuple[tuple[str, str], ...]]


def metrics(pages: Sequence[str], rules: Mapping[str, Merge], gone: Sequence[str] = ()) -> str:
    """Prometheus' text of all pages together. Counters and histograms are summed, gauges as `rules` say, by name; of
    the pages of those who are `gone` only what was counted."""
    order: dict[str, tuple[str, str, dict[Series, float]]] = {}
    for family in chain(_families(pages), (each for each in _families(gone) if each.type != "gauge")):
        kind, _, series = order.setdefault(family.name, (family.type, family.documentation, {}))
        rule = _rule(family.name, kind, rules)
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            key = sample.name, tuple(sorted(sample.labels.items()))
            before = series.get(key)
            series[key] = sample.value if before is None else _one(rule, before, sample.value)
    return "".join(_shown(name, *found) for name, found in order.items())


def _families(pages: Sequence[str]) -> Iterator[Metric]:
    return chain.from_iterable(map(text_string_to_metric_families, pages))


def _rule(name: str, kind: str, rules: Mapping[str, Merge]) -> Merge:
    if kind != "gauge":
        return Merge.SUM
    return Merge.MIN if name == EARLIEST else rules.get(name, Merge.SUM)


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


def _shown(name: str, kind: str, text: str, series: Mapping[Series, float]) -> str:
    shown = f"{name}_total" if kind == "counter" else name
    lines = [f"# HELP {shown} {_escaped(text)}\n# TYPE {shown} {kind}\n"]
    for (sample, labels), value in series.items():
        inside = ",".join(f'{label}="{_quoted(told)}"' for label, told in labels)
        lines.append(f"{sample}{{{inside}}} {value!r}\n" if inside else f"{sample} {value!r}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


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
