"""The goodput bench's page: means over seeds, their spread, ratios to the best published rule. No measuring here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from statistics import fmean

from bench.goodput_cells import Reading

OURS = ("round_robin", "least_loaded", "prefix_aware", "priced")
"""Policies of this house: the others are published rules."""


def page(readings: Sequence[Reading]) -> str:
    """docs/goodput.md."""
    parts = [INTRODUCTION, *capacities(readings, "0.9"), *capacities(readings, "0.99")]
    parts += [*agents(readings), *overload(readings), *split(readings)]
    parts += [*trouble(readings), *tenants(readings), *errors(readings)]
    return "\n".join(parts) + "\n"


INTRODUCTION = """# Goodput

Written by `make goodput` (bench/goodput.py): the gateway's own policies and admissions before mock TP groups on a
virtual clock. Capacity is the load at which 90 % of requests still meet both budgets, TTFT and TPOT; loads are
multiples of the recorded rate, for b2b requests a second. Each cell is the mean over seeds and, after ±, half the
spread between the lowest and the highest. Ratios are to the best published rule on the same workload. The weights of
`priced` were chosen on other slices of the traces (conversation 0-1200 s, azure 0-900 s) and are the same everywhere.
The knee of agents is at 280 users.
"""


def grouped(
    readings: Iterable[Reading],
    table: str,
    key: Callable[[Reading], tuple[str, str]],
    value: Callable[[Reading], float],
) -> dict[str, dict[str, list[float]]]:
    """value by row and column, one per seed."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in readings:
        if one.cell.table == table:
            row, column = key(one)
            found[row][column].append(value(one))
    return found


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Mean and half the spread."""
    if not values:
        return "-"
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.{digits}f}" + (f" ±{half:.{digits}f}" if len(values) > 1 else "")


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


OF_IDLE = {"0.99": ("", "Of what an idle fleet keeps: some recorded prompts are too long for any.")}


def capacities(readings: Sequence[Reading], target: str) -> list[str]:
    """Policies by workloads, with the ratios that matter: seed by seed to the best published rule of that seed."""
    met = [one for one in readings if target in one.capacities and one.cell.table == "capacity"]
    if not met:
        return []
    names = sorted({one.cell.workload for one in met})
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    best: dict[tuple[str, int], float] = defaultdict(float)
    for one in met:
        if one.cell.policy not in OURS:
            key = one.cell.workload, one.cell.seed
            best[key] = max(best[key], one.capacities[target])
    for one in sorted(met, key=lambda one: one.cell.seed):
        name, load = one.cell.workload, one.capacities[target]
        found[one.cell.policy][name].append(load)
        if best[name, one.cell.seed]:
            ratios[one.cell.policy][name].append(load / best[name, one.cell.seed])
    rows = []
    for policy, row in sorted(ratios.items(), key=lambda item: -geomean(item[1])):
        worst = f"{min(fmean(each) for each in row.values()):.2f}"
        seeds = str(max(len(each) for each in row.values()))
        rows.append(
            [
                policy,
                *(shown(found[policy].get(name, ())) for name in names),
                seeds,
                worst,
                of_all(row, names),
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
        *OF_IDLE.get(target, ()),
        "",
        *table_of(head, rows),
    ]


def of_all(row: dict[str, list[float]], names: Sequence[str]) -> str:
    """The geometric mean, and over how many workloads where some were not measured."""
    told = f"{geomean(row):.3f}"
    return told if len(row) == len(names) else f"{told} ({len(row)} of {len(names)})"


def geomean(row: dict[str, list[float]]) -> float:
    """Geometric mean over workloads of mean ratios; 0 or so where there is no capacity at all."""
    return exp(fmean(log(max(fmean(each), 1e-6)) for each in row.values())) if row else 0.0


def agents(readings: Sequence[Reading]) -> list[str]:
    """Good requests a second by users."""
    found = grouped(
        readings,
        "agents",
        lambda one: (
            f"{one.cell.policy} / {one.cell.admission or 'all let in'}",
            f"{one.cell.load:g}",
        ),
        lambda one: one.figures["goodput"],
    )
    if not found:
        return []
    names = sorted({name for row in found.values() for name in row}, key=float)
    rows = [
        [policy, *(shown(row.get(name, ())) for name in names)]
        for policy, row in sorted(found.items())
    ]
    return [
        "## Agent sessions: good requests a second by users",
        "",
        *table_of(["policy / admission", *names], rows),
    ]


def overload(readings: Sequence[Reading]) -> list[str]:
    """Token goodput at and beyond capacity over the best at capacity, by admission."""
    base: dict[tuple[str, int], float] = defaultdict(float)
    for one in readings:
        if one.cell.table == "overload x1":
            key = one.cell.workload, one.cell.seed
            base[key] = max(base[key], one.figures["token_goodput"])
    lines: list[str] = []
    for times in ("1", "2", "3"):
        rows = []
        groups: dict[tuple[str, str], list[Reading]] = defaultdict(list)
        for one in readings:
            if one.cell.table == f"overload x{times}" and base[one.cell.workload, one.cell.seed]:
                groups[one.cell.workload, one.cell.admission].append(one)
        for (workload, admission), each in sorted(groups.items()):
            held = [one.figures["token_goodput"] / base[workload, one.cell.seed] for one in each]
            kept = [
                one.figures["long_kept"] for one in each if one.figures["long_kept"] is not None
            ]
            rows.append(
                [
                    *(
                        workload,
                        admission,
                        shown(held),
                        shown([one.figures["goodput"] for one in each]),
                    ),
                    f"{fmean(one.figures['refused'] for one in each):.1%}",
                    f"{fmean(kept):.0%}" if kept else "-",
                    f"{fmean(one.figures['wasted'] for one in each):.1%}",
                ]
            )
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
            lines += [f"## {times} times capacity, policy priced", "", *table_of(head, rows)]
    return lines


def trouble(readings: Sequence[Reading]) -> list[str]:
    """Our policy's capacity with an old or a patchy view."""
    found = grouped(
        readings,
        "trouble",
        lambda one: (
            one.cell.workload,
            {"": "as usual", "stale": "5 s stale", "lost": "events lost"}[one.cell.trouble],
        ),
        lambda one: one.capacities["0.9"],
    )
    if not found:
        return []
    names = ("as usual", "5 s stale", "events lost")
    rows = [
        [name, *(shown(row.get(column, ())) for column in names)]
        for name, row in sorted(found.items())
    ]
    return ["## Capacity of priced with a worse view", "", *table_of(["workload", *names], rows)]


def tenants(readings: Sequence[Reading]) -> list[str]:
    """How a tenant fares beside one that asks for more."""
    rows = []
    groups: dict[tuple[str, str, float], list[Reading]] = defaultdict(list)
    for one in readings:
        if one.cell.table == "tenants":
            groups[one.cell.policy, one.cell.admission, one.cell.load].append(one)
    for (policy, admission, greed), each in sorted(groups.items()):
        quiet = [one.figures["tenants"]["a"] for one in each]
        columns = [shown([one[place] for one in quiet]) for place in range(3)]
        rows.append(
            [
                policy,
                admission,
                f"{greed:g}x",
                *columns,
                f"{fmean(one.figures['refused'] for one in each):.0%}",
            ]
        )
    head = [
        "policy",
        "admission",
        "the other asks for",
        "attainment",
        "TTFT p50, s",
        "TTFT p99, s",
        "refused of all",
    ]
    return ["## A tenant beside one that asks for more", "", *table_of(head, rows)] if rows else []


def errors(readings: Sequence[Reading]) -> list[str]:
    """How far predictions of priced's TTFT are off at its capacity, over all requests that were served."""
    names = ("ttft_error", "ttft_error_p50")
    groups: dict[str, list[list[float]]] = defaultdict(list)
    for one in readings:
        if (
            one.cell.table == "capacity"
            and one.cell.policy == "priced"
            and one.figures["ttft_error"] is not None
        ):
            groups[one.cell.workload].append([one.figures[name] for name in names])
    rows = [
        [workload, *(f"{fmean(values):.0%}" for values in zip(*each, strict=True))]
        for workload, each in sorted(groups.items())
    ]
    head = ["workload", "MAPE", "median error"]
    return ["## TTFT foreseen at the pick, policy priced at capacity", "", *table_of(head, rows)]


def split(readings: Sequence[Reading]) -> list[str]:
    """Capacity by TPOT budget for fleets whole and split."""
    found = grouped(
        readings,
        "split",
        lambda one: (f"{one.cell.fleet} {one.cell.policy}", f"{(one.cell.tpot_s or 0) * 1e3:g} ms"),
        lambda one: one.capacities["0.9"],
    )
    if not found:
        return []
    names = sorted(
        {name for row in found.values() for name in row}, key=lambda name: float(name.split()[0])
    )
    rows = [
        [fleet, *(shown(row.get(name, ())) for name in names)]
        for fleet, row in sorted(found.items())
    ]
    return [
        "## Prefill and decode: capacity by TPOT budget, conversation",
        "",
        *table_of(["fleet and policy", *names], rows),
    ]
