"""The goodput bench's page: means over seeds, their spread, ratios to the best published rule. No measuring here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from statistics import fmean

from tests.bench.goodput_cells import Reading

OURS = ("round_robin", "least_loaded", "prefix_aware", "priced")
"""Policies of this house: the others are published rules."""


def page(readings: Sequence[Reading]) -> str:
    """docs/goodput.md."""
    parts = [INTRODUCTION, *capacities(readings, "0.9"), *capacities(readings, "0.99")]
    parts += [*agents(readings), *overload(readings), *split(readings)]
    return "\n".join(parts) + "\n"


INTRODUCTION = """# Goodput

Written by `make goodput` (tests/bench/goodput.py): the gateway's own policies and admissions before mock TP groups on a
virtual clock. Capacity is the load at which 90 % (99 %) of requests still meet both budgets, TTFT and TPOT; loads are
multiples of the recorded rate, for b2b requests a second. Each cell is the mean over seeds and, after ±, half the
spread between the lowest and the highest. Ratios are to the best published rule on the same workload. The weights of
`priced` were chosen on other slices of the traces (conversation 0-1200 s, azure 0-900 s) and are the same everywhere.
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


def capacities(readings: Sequence[Reading], target: str) -> list[str]:
    """Policies by workloads, with the ratios that matter."""
    met = [one for one in readings if target in one.capacities]
    found = grouped(
        met, "capacity", lambda one: (one.cell.policy, one.cell.workload), lambda one: one.capacities[target]
    )
    if not found:
        return []
    names = sorted({name for row in found.values() for name in row})
    mean = {policy: {name: fmean(each) for name, each in row.items()} for policy, row in found.items()}
    best = {
        name: max((row[name] for policy, row in mean.items() if policy not in OURS and name in row), default=0.0)
        for name in names
    }
    rows = []
    for policy, row in sorted(found.items(), key=lambda item: -geomean(mean[item[0]], best)):
        ratios = [mean[policy][name] / best[name] for name in names if name in row and best[name]]
        worst = f"{min(ratios):.2f}" if ratios else "-"
        rows.append(
            [policy, *(shown(row.get(name, ())) for name in names), worst, f"{geomean(mean[policy], best):.3f}"]
        )
    head = ["policy", *names, "worst ratio to the best published", "geometric mean of ratios"]
    return [f"## Capacity at {float(target):.0%} attainment", "", *table_of(head, rows)]


def geomean(row: dict[str, float], best: dict[str, float]) -> float:
    """Geometric mean over workloads of a policy's ratio to the best published; 0 where it has no capacity at all."""
    ratios = [value / best[name] for name, value in row.items() if best.get(name)]
    return exp(fmean(log(max(ratio, 1e-6)) for ratio in ratios)) if ratios else 0.0


def agents(readings: Sequence[Reading]) -> list[str]:
    """Good requests a second by users."""
    found = grouped(
        readings,
        "agents",
        lambda one: (f"{one.cell.policy} / {one.cell.admission or 'all let in'}", f"{one.cell.load:g}"),
        lambda one: one.figures["goodput"],
    )
    if not found:
        return []
    names = sorted({name for row in found.values() for name in row}, key=float)
    rows = [[policy, *(shown(row.get(name, ())) for name in names)] for policy, row in sorted(found.items())]
    return ["## Agent sessions: good requests a second by users", "", *table_of(["policy / admission", *names], rows)]


def overload(readings: Sequence[Reading]) -> list[str]:
    """Token goodput beyond capacity over that at capacity."""
    lines: list[str] = []
    for times in ("2", "3"):
        rows = []
        for one in sorted(
            (one for one in readings if one.cell.table == f"overload x{times}"),
            key=lambda one: (one.cell.workload, one.cell.admission, one.cell.seed),
        ):
            base = max(
                (
                    other.figures["token_goodput"]
                    for other in readings
                    if other.cell.table == "overload x1"
                    and (other.cell.workload, other.cell.seed) == (one.cell.workload, one.cell.seed)
                ),
                default=0.0,
            )
            kept = one.figures["long_kept"]
            rows.append(
                [
                    *(one.cell.workload, one.cell.admission, str(one.cell.seed)),
                    f"{one.figures['token_goodput'] / base:.2f}" if base else "-",
                    f"{one.figures['goodput']:.2f}",
                    "-" if kept is None else f"{kept:.0%}",
                    f"{one.figures['wasted']:.1%}",
                ]
            )
        if rows:
            head = ["workload", "admission", "seed", "token goodput to capacity's", "good/s", "kept of > 32k", "wasted"]
            lines += [f"## {times} times capacity, policy priced", "", *table_of(head, rows)]
    return lines


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
    names = sorted({name for row in found.values() for name in row}, key=lambda name: float(name.split()[0]))
    rows = [[fleet, *(shown(row.get(name, ())) for name in names)] for fleet, row in sorted(found.items())]
    return [
        "## Prefill and decode: capacity by TPOT budget, conversation",
        "",
        *table_of(["fleet and policy", *names], rows),
    ]
