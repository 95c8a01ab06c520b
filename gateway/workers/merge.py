"""Several workers' pages made one: metrics by the rule that the catalogue gives each, endpoints by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.meters import Merge

SUMMED = ("in_flight", "connections")
FIRST = frozenset({"penstock_process_start_time_seconds", "penstock_process_max_fds"})

Series = tuple[str, tuple[tuple[str, str], ...]]


def metrics(pages: Sequence[str], rules: Mapping[str, Merge]) -> str:
    """Prometheus' text of all pages together. Counters and histograms are summed, gauges as `rules` say, by name."""
    order: dict[str, tuple[str, str, dict[Series, float]]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            kind, _, series = order.setdefault(family.name, (family.type, family.documentation, {}))
            rule = _rule(family.name, kind, rules)
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = series.get(key)
                series[key] = sample.value if before is None else _one(rule, before, sample.value)
    return "".join(_shown(name, *found) for name, found in order.items())


def _rule(name: str, kind: str, rules: Mapping[str, Merge]) -> Merge:
    if kind != "gauge":
        return Merge.SUM
    return Merge.MIN if name in FIRST else rules.get(name, Merge.SUM)


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
                one |= {name: each[name] for name in ("available", "state", "cause", "back_in_s")}
    return {"endpoints": list(found.values())} | rest
