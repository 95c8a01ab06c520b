"""Formats the tables of docs/goodput.md: means over random seeds, their spread, and ratios.

Ratios compare with the best routing rule known from publications. bench/goodput_cells.py does the
measurements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from statistics import fmean

from bench.goodput_cells import Measurement

ValuesByPolicy = dict[str, dict[str, list[float]]]  # policy -> workload -> a value per seed

OURS = ("round_robin", "least_loaded", "prefix_aware", "priced")
"""The project's own policies; all others are published rules."""


def page(measurements: Sequence[Measurement]) -> str:
    """Return the generated part of docs/goodput.md, as Markdown, made from the measurements."""
    parts = [INTRODUCTION, *capacities(measurements, "0.9"), *capacities(measurements, "0.99")]
    parts += [*agents(measurements), *overload(measurements), *split(measurements)]
    parts += [*trouble(measurements), *tenants(measurements), *errors(measurements)]
    return "\n".join(parts) + "\n"


INTRODUCTION = """# Goodput

Written by `make goodput` (bench/goodput.py): the gateway's policies and admissions with mock TP
groups on a virtual clock. Capacity is the highest load at which 90 % of requests meet both budgets,
TTFT and TPOT. Loads are multiples of the recorded rate; for b2b, requests per second. Each cell is
the mean over seeds and, after ±, half the range. Ratios are to the best published rule on the same
workload. The weights of `priced` were chosen on other slices of the traces (conversation 0-1200 s,
azure 0-900 s) and are the same everywhere. With more than 280 users the contexts of the agents do
not fit into the KV cache.
"""


def grouped(
    measurements: Iterable[Measurement],
    table: str,
    key: Callable[[Measurement], tuple[str, str]],
    value: Callable[[Measurement], float],
) -> dict[str, dict[str, list[float]]]:
    """Arrange the values of a table in rows and columns. A cell has one value per random seed.

    table  name of the table, as in Cell.table
    key    function that returns a measurement's row and column
    value  function that returns its value
    """
    values_of: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in measurements:
        if item.cell.table == table:
            row, column = key(item)
            values_of[row][column].append(value(item))
    return values_of


def format_values(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "-"
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.{digits}f}" + (f" ±{half:.{digits}f}" if len(values) > 1 else "")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


RELATIVE_NOTES = {
    "0.99": ("", "Relative to an idle fleet: some recorded prompts are too long for any fleet.")
}
"""Paragraph below a table's heading, by attainment target."""


def capacities(measurements: Sequence[Measurement], target: str) -> list[str]:
    """Return the table of capacities by policy and workload, as Markdown lines.

    A capacity is the highest rate of good requests per second at which the share `target` of all
    requests meets its latency budgets. Ratios compare with the best published routing rule on the
    same seed.
    """
    met = [
        item for item in measurements if target in item.capacities and item.cell.table == "capacity"
    ]
    if not met:
        return []
    names = sorted({item.cell.workload for item in met})
    values_of, ratios = _capacities_and_ratios(met, target)
    rows = []
    for policy, row in sorted(ratios.items(), key=lambda item: -geomean(item[1])):
        worst = f"{min(fmean(values) for values in row.values()):.2f}"
        seeds = str(max(len(values) for values in row.values()))
        rows.append(
            [
                policy,
                *(format_values(values_of[policy].get(name, ())) for name in names),
                seeds,
                worst,
                format_geomean(row, names),
            ]
        )
    head = [
        "policy",
        *names,
        "seeds",
        "worst ratio to the best published",
        "geometric mean of ratios",
    ]
    return [
        f"## Capacity at {float(target):.0%} attainment",
        *RELATIVE_NOTES.get(target, ()),
        "",
        *markdown_table(head, rows),
    ]


def _capacities_and_ratios(
    met: Sequence[Measurement], target: str
) -> tuple[ValuesByPolicy, ValuesByPolicy]:
    # Return the capacities, and their ratios to the best published rule with the same seed.
    capacities: ValuesByPolicy = defaultdict(lambda: defaultdict(list))
    ratios: ValuesByPolicy = defaultdict(lambda: defaultdict(list))
    best: dict[tuple[str, int], float] = defaultdict(float)
    for item in met:
        if item.cell.policy not in OURS:
            key = item.cell.workload, item.cell.seed
            best[key] = max(best[key], item.capacities[target])
    for item in sorted(met, key=lambda item: item.cell.seed):
        name, load = item.cell.workload, item.capacities[target]
        capacities[item.cell.policy][name].append(load)
        if best[name, item.cell.seed]:
            ratios[item.cell.policy][name].append(load / best[name, item.cell.seed])
    return capacities, ratios


def format_geomean(row: dict[str, list[float]], names: Sequence[str]) -> str:
    """Return the geometric mean over the workloads of a row, as text.

    If some workloads were not measured, the text also says over how many the mean is.
    """
    mean = f"{geomean(row):.3f}"
    return mean if len(row) == len(names) else f"{mean} ({len(row)} of {len(names)})"


def geomean(row: dict[str, list[float]]) -> float:
    """Return the geometric mean of one rule's ratios over all workloads.

    The value of a workload is the mean ratio of all seeds. The result is almost 0 if a capacity is
    0.
    """
    return exp(fmean(log(max(fmean(ratios), 1e-6)) for ratios in row.values())) if row else 0.0


def agents(measurements: Sequence[Measurement]) -> list[str]:
    """Build the Markdown table for coding agents: good requests per second, by number of users."""
    values_of = grouped(
        measurements,
        "agents",
        lambda item: (
            f"{item.cell.policy} / {item.cell.admission or 'none'}",
            f"{item.cell.load:g}",
        ),
        lambda item: item.figures["goodput"],
    )
    if not values_of:
        return []
    names = sorted({name for row in values_of.values() for name in row}, key=float)
    rows = [
        [policy, *(format_values(row.get(name, ())) for name in names)]
        for policy, row in sorted(values_of.items())
    ]
    return [
        "## Agent sessions: good requests per second by users",
        "",
        *markdown_table(["policy / admission", *names], rows),
    ]


def overload(measurements: Sequence[Measurement]) -> list[str]:
    """Return the tables of admission rules under overload, as Markdown lines.

    The values are tokens of good requests per second, relative to the best rule at capacity.
    """
    base: dict[tuple[str, int], float] = defaultdict(float)
    for item in measurements:
        if item.cell.table == "overload x1":
            key = item.cell.workload, item.cell.seed
            base[key] = max(base[key], item.figures["token_goodput"])
    lines: list[str] = []
    for times in ("1", "2", "3"):
        rows = []
        groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
        for item in measurements:
            if item.cell.table == f"overload x{times}" and base[item.cell.workload, item.cell.seed]:
                groups[item.cell.workload, item.cell.admission].append(item)
        for (workload, admission), group in sorted(groups.items()):
            ratios = [
                item.figures["token_goodput"] / base[workload, item.cell.seed] for item in group
            ]
            rows.append([workload, admission, format_values(ratios), *_overload_cells(group)])
        if rows:
            head = [
                "workload",
                "admission",
                "token goodput to capacity's",
                "good/s",
                "refused",
                "good of > 32k",
                "wasted",
            ]
            lines += [f"## {times} times capacity, policy priced", "", *markdown_table(head, rows)]
    return lines


def _overload_cells(group: Sequence[Measurement]) -> list[str]:
    # Return the cells of one admission rule: good requests, refusals, long prompts, waste.
    long_kept = [
        item.figures["long_kept"] for item in group if item.figures["long_kept"] is not None
    ]
    return [
        format_values([item.figures["goodput"] for item in group]),
        f"{fmean(item.figures['refused'] for item in group):.1%}",
        f"{fmean(long_kept):.0%}" if long_kept else "-",
        f"{fmean(item.figures['wasted'] for item in group):.1%}",
    ]


def trouble(measurements: Sequence[Measurement]) -> list[str]:
    """Return the table of the load that is served with outdated metrics or lost messages."""
    values_of = grouped(
        measurements,
        "trouble",
        lambda item: (
            item.cell.workload,
            {"": "as usual", "stale": "5 s stale", "lost": "events lost"}[item.cell.trouble],
        ),
        lambda item: item.capacities["0.9"],
    )
    if not values_of:
        return []
    names = ("as usual", "5 s stale", "events lost")
    rows = [
        [name, *(format_values(row.get(column, ())) for column in names)]
        for name, row in sorted(values_of.items())
    ]
    return [
        "## Capacity of priced with incomplete information",
        "",
        *markdown_table(["workload", *names], rows),
    ]


def tenants(measurements: Sequence[Measurement]) -> list[str]:
    """Return the table of how well a tenant is served beside a greedier one, as Markdown lines.

    Each row has one routing policy, one admission rule, and one load of the greedier tenant (as a
    multiple of the other tenant's load).
    """
    rows = []
    groups: dict[tuple[str, str, float], list[Measurement]] = defaultdict(list)
    for item in measurements:
        if item.cell.table == "tenants":
            groups[item.cell.policy, item.cell.admission, item.cell.load].append(item)
    for (policy, admission, greed), group in sorted(groups.items()):
        quiet = [item.figures["tenants"]["a"] for item in group]
        columns = [format_values([item[index] for item in quiet]) for index in range(3)]
        rows.append(
            [
                policy,
                admission,
                f"{greed:g}x",
                *columns,
                f"{fmean(item.figures['refused'] for item in group):.0%}",
            ]
        )
    head = [
        "policy",
        "admission",
        "load of the other tenant",
        "attainment",
        "TTFT p50, s",
        "TTFT p99, s",
        "refused of all",
    ]
    return (
        ["## A tenant next to one with a higher load", "", *markdown_table(head, rows)]
        if rows
        else []
    )


def errors(measurements: Sequence[Measurement]) -> list[str]:
    names = ("ttft_error", "ttft_error_p50")
    groups: dict[str, list[list[float]]] = defaultdict(list)
    for item in measurements:
        if (
            item.cell.table == "capacity"
            and item.cell.policy == "priced"
            and item.figures["ttft_error"] is not None
        ):
            groups[item.cell.workload].append([item.figures[name] for name in names])
    rows = [
        [workload, *(f"{fmean(values):.0%}" for values in zip(*group, strict=True))]
        for workload, group in sorted(groups.items())
    ]
    head = ["workload", "MAPE", "median error"]
    return [
        "## TTFT predicted at the pick, policy priced at capacity",
        "",
        *markdown_table(head, rows),
    ]


def split(measurements: Sequence[Measurement]) -> list[str]:
    """Return the table of capacity by limit on the time per output token, as Markdown lines.

    It compares fleets that split requests into prefill and decode with fleets that do not.
    """
    values_of = grouped(
        measurements,
        "split",
        lambda item: (
            f"{item.cell.fleet} {item.cell.policy}",
            f"{(item.cell.tpot_s or 0) * 1e3:g} ms",
        ),
        lambda item: item.capacities["0.9"],
    )
    if not values_of:
        return []
    names = sorted(
        {name for row in values_of.values() for name in row},
        key=lambda name: float(name.split()[0]),
    )
    rows = [
        [fleet, *(format_values(row.get(name, ())) for name in names)]
        for fleet, row in sorted(values_of.items())
    ]
    return [
        "## Prefill and decode: capacity by TPOT budget, conversation",
        "",
        *markdown_table(["fleet and policy", *names], rows),
    ]
