"""Computes statistics over random workloads, and formats them as a Markdown page.

A ratio is the capacity of our policy, divided by that of another rule on the same workload with the
same arrivals. Where the best rule is meant, it is chosen with one random seed of arrivals, and
compared with the other seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log, sqrt
from statistics import fmean

from bench.zoo.measure import HIGHEST, STEP
from bench.zoo.results import LEAST, Result, reference_step
from bench.zoo.space import WEIGHTS, Workload

NEAR, FAR = 0.97, 0.93
LOW_LOADS = (0.25, 0.5, 0.8)
T_95 = 2.0
"""Quantile of Student's t for a 95 % interval from 30 to 200 workloads, rounded up."""

ByPolicy = Mapping[str, Mapping[int, Result]]
"""The results of one workload, by policy and seed of arrivals."""


def page(workloads: Mapping[int, Workload], results: Iterable[Result], ours: str) -> str:
    tables = _by_workload(results)
    used, dropped = _split_dropped(tables, ours)
    if not used:
        return "No workload has been measured with all policies.\n"
    rules = sorted({policy for by in used.values() for policy in by} - {ours})
    parts = [
        f"{len(used)} workloads counted, {len(dropped)} dropped.\n",
        *(f"- dropped {workloads[number].name}: {why}\n" for number, why in dropped.items()),
        "\n## Capacity at 90 % attainment\n\n",
        _rules_table(used, rules, ours),
        "\n",
        _best_rule_lines(used, rules, ours),
        "\n## Other targets\n\n",
        _targets_table(used, rules, ours),
        "\n## Attainment below capacity\n\n",
        _low_loads_table(used, rules, ours),
        "\n## Worst ratio to the best rule by axis\n\n",
        _axes_table(used, rules, ours, workloads),
        "\n## Workloads\n\n",
        _workloads_table(used, rules, ours, workloads),
    ]
    return "".join(parts)


def _by_workload(results: Iterable[Result]) -> dict[int, dict[str, dict[int, Result]]]:
    tables: dict[int, dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        tables[result.number][result.policy][result.arrivals] = result
    return tables


def _split_dropped(
    tables: Mapping[int, ByPolicy], ours: str
) -> tuple[dict[int, ByPolicy], dict[int, str]]:
    used, dropped = {}, {}
    for number, by in sorted(tables.items()):
        cells = [result for results in by.values() for result in results.values()]
        if any(result.dropped for result in cells):
            dropped[number] = "slow to replay"
            continue
        if ours not in by or any(not set(by[policy]) <= set(by[ours]) for policy in by):
            continue
        capacities = [result.capacity["0.9"] for result in cells if result.policy != ours]
        if not capacities:
            continue
        if max(capacities) <= LEAST:
            dropped[number] = "no rule reaches 90 %"
        elif min(capacities) >= STEP**HIGHEST:
            dropped[number] = "every rule reaches 90 % at any load"
        else:
            used[number] = by
    return used, dropped


def ratio(by: ByPolicy, rule: str, ours: str, target: str = "0.9") -> float:
    """Return our policy's capacity divided by that of another rule.

    It is the geometric mean over the random seeds of arrivals.

    by      the results on one workload, by policy and seed
    rule    the other rule
    ours    our policy
    target  share of requests that must be in time for a load to count
    """
    logs = [
        log(by[ours][arrivals].load(target) / result.load(target))
        for arrivals, result in by[rule].items()
        if target in result.capacity and target in by[ours][arrivals].capacity
    ]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def best_rule_ratio(by: ByPolicy, rules: Sequence[str], ours: str, target: str = "0.9") -> float:
    """Return our policy's capacity divided by that of the best other rule.

    The best rule is chosen with the other random seed of arrivals, so that chance does not favour
    it.

    by      the results on one workload, by policy and seed
    rules   the other rules
    ours    our policy
    target  share of requests that must be in time for a load to count
    """
    logs = []
    seeds = sorted(by[ours])
    for arrivals in seeds:
        other = next((seed for seed in seeds if seed != arrivals), arrivals)
        measured = [
            rule
            for rule in rules
            if rule in by
            and all(seed in by[rule] for seed in (other, arrivals))
            and target in by[rule][other].capacity
            and target in by[rule][arrivals].capacity
        ]
        if measured and target in by[ours][arrivals].capacity:
            best = max(measured, key=lambda rule: by[rule][other].load(target))
            logs.append(log(by[ours][arrivals].load(target) / by[best][arrivals].load(target)))
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def geometric_mean(ratios: Sequence[float]) -> tuple[float, float, float]:
    logs = [log(value) for value in ratios if value == value]
    if not logs:
        return (float("nan"),) * 3
    mean = sum(logs) / len(logs)
    spread = sqrt(sum((value - mean) ** 2 for value in logs) / max(1, len(logs) - 1))
    half = T_95 * spread / sqrt(len(logs))
    return exp(mean - half), exp(mean), exp(mean + half)


def _rules_table(used: Mapping[int, ByPolicy], rules: Sequence[str], ours: str) -> str:
    lines = ["| rule | priced / rule, geometric mean | 95 % interval | least | most |\n", _bar(5)]
    rows = []
    for rule in rules:
        ratios = [ratio(by, rule, ours) for by in used.values() if rule in by]
        low, mean, high = geometric_mean(ratios)
        rows.append((mean, rule, low, high, min(ratios), max(ratios)))
    for mean, rule, low, high, least, most in sorted(rows):
        lines.append(
            f"| {rule} | {mean:.3f} | {low:.3f} to {high:.3f} | {least:.2f} | {most:.2f} |\n"
        )
    return "".join(lines)


def _bar(columns: int) -> str:
    return "|" + "---|" * columns + "\n"


def _best_rule_lines(used: Mapping[int, ByPolicy], rules: Sequence[str], ours: str) -> str:
    ratios = [best_rule_ratio(by, rules, ours) for by in used.values()]
    low, mean, high = geometric_mean(ratios)
    near = sum(value >= NEAR for value in ratios) / len(ratios)
    far = sum(value >= FAR for value in ratios) / len(ratios)
    return (
        f"To the best rule of each workload: geometric mean {mean:.3f} ({low:.3f} to {high:.3f}), "
        f"at least {NEAR} on {near:.0%} and at least {FAR} on {far:.0%} of the workloads, "
        f"least {min(ratios):.2f}.\n"
    )


def _targets_table(used: Mapping[int, ByPolicy], rules: Sequence[str], ours: str) -> str:
    lines = ["| attainment | to the best rule, geometric mean | 95 % interval | least |\n", _bar(4)]
    for target in ("0.9", "0.95", "0.99"):
        ratios = [best_rule_ratio(by, rules, ours, target) for by in used.values()]
        ratios = [value for value in ratios if value == value]
        if ratios:
            low, mean, high = geometric_mean(ratios)
            lines.append(
                f"| {float(target):.0%} | {mean:.3f} | {low:.3f} to {high:.3f} | "
                f"{min(ratios):.2f} |\n"
            )
    return "".join(lines)


def attainment_gap(by: ByPolicy, rules: Sequence[str], ours: str, share: float) -> float:
    """Return the best rule's attainment (share of requests in time) minus Penstock's.

    Both are measured at a fraction of the best rule's capacity. The best rule is chosen by the
    other random seed of arrivals, among the rules measured there.
    """
    gaps = []
    seeds = sorted(by[ours])
    steps = {
        seed: reference_step(by[rule][seed] for rule in rules if seed in by.get(rule, {}))
        + round(log(share) / log(STEP))
        for seed in seeds
    }
    for arrivals in seeds:
        other = next((seed for seed in seeds if seed != arrivals), arrivals)
        measured = [
            rule
            for rule in rules
            if rule in by
            and all(seed in by[rule] for seed in (other, arrivals))
            and steps[other] in by[rule][other].attainment
            and steps[arrivals] in by[rule][arrivals].attainment
        ]
        own = by[ours][arrivals].attainment.get(steps[arrivals])
        if measured and own is not None:
            best = max(measured, key=lambda rule: by[rule][other].attainment[steps[other]])
            gaps.append(by[best][arrivals].attainment[steps[arrivals]] - own)
    return sum(gaps) / len(gaps) if gaps else float("nan")


def _low_loads_table(used: Mapping[int, ByPolicy], rules: Sequence[str], ours: str) -> str:
    lines = [
        "| share of the best rule's capacity | mean gap to the best rule, points | "
        "within 0.5 points | within 1.5 points | largest gap |\n",
        _bar(5),
    ]
    for share in LOW_LOADS:
        gaps = [100 * attainment_gap(by, rules, ours, share) for by in used.values()]
        gaps = [gap for gap in gaps if gap == gap]
        if gaps:
            half = sum(gap <= 0.5 for gap in gaps) / len(gaps)
            more = sum(gap <= 1.5 for gap in gaps) / len(gaps)
            lines.append(
                f"| {share:g} | {sum(gaps) / len(gaps):.2f} | {half:.0%} | {more:.0%} | "
                f"{max(gaps):.1f} |\n"
            )
    return "".join(lines)


def _axes_table(
    used: Mapping[int, ByPolicy],
    rules: Sequence[str],
    ours: str,
    workloads: Mapping[int, Workload],
) -> str:
    lines = ["| axis | value | workloads | geometric mean | least |\n", _bar(5)]
    for axis in ("arrivals", "answers", "sharing", "condition", "split", "groups", "model"):
        for value in WEIGHTS[axis]:
            ratios = [
                best_rule_ratio(by, rules, ours)
                for number, by in used.items()
                if str(getattr(workloads[number], axis)) == value
            ]
            if ratios:
                _, mean, _ = geometric_mean(ratios)
                lines.append(
                    f"| {axis} | {value} | {len(ratios)} | {mean:.3f} | {min(ratios):.2f} |\n"
                )
    return "".join(lines)


def _workloads_table(
    used: Mapping[int, ByPolicy],
    rules: Sequence[str],
    ours: str,
    workloads: Mapping[int, Workload],
) -> str:
    lines = ["| workload | drawn | best rule | priced / best rule |\n", _bar(4)]
    for number, by in used.items():
        workload = workloads[number]
        # Rules far behind were measured with fewer seeds, and one of them may be an easy one.
        most = max(len(by[rule]) for rule in rules if rule in by)
        means = {
            rule: fmean(log(result.load("0.9")) for result in by[rule].values())
            for rule in rules
            if rule in by and len(by[rule]) == most
        }
        drawn = (
            f"{workload.arrivals}, {workload.answers}, {workload.sharing}, {workload.condition}, "
            f"{workload.split}, {workload.groups} x {workload.model}"
        )
        best = max(means, key=lambda rule: means[rule])
        value = best_rule_ratio(by, rules, ours)
        lines.append(f"| {workload.name} | {drawn} | {best} | {value:.2f} |\n")
    return "".join(lines)
