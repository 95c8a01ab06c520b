"""The table of `make bench`: medians, ratios to the other systems, and which goals are met.

Measuring is in bench/cells.py.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cells import Row
from systems import OURS, SOURCES

COLUMNS = (OURS, SOURCES, "sglang-router", "vllm-router", "nginx", "direct")
MAX_OTHERS = 0.05
"""Highest share of the gateway's core that other processes may use in a valid run."""


@dataclass
class Results:
    """Measured samples by row and system in order of measurement, and reasons for missing
    samples.
    """

    rows: list[Row]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def add(self, row: Row, system: str, value: float) -> None:
        self.samples.setdefault(row.name, {}).setdefault(system, []).append(value)

    @property
    def ours(self) -> str:
        """Return the column of our gateway that goals apply to: compiled, or the sources if only
        they were measured.
        """
        measured = {system for systems in self.samples.values() for system in systems}
        return SOURCES if SOURCES in measured and OURS not in measured else OURS

    def median(self, row: Row, system: str) -> float | None:
        values = self.samples.get(row.name, {}).get(system)
        return median(values) if values else None


@dataclass(frozen=True)
class Verdict:
    """The outcome of one goal of one row of the table: the measured value, and whether it meets the
    goal.
    """

    row: str
    goal: str
    value: float
    met: bool


def compare(results: Results, row: Row, other: str) -> float | None:
    """Return the ratio of our value to another system's, or their difference if the row is `added`.

    Returns None if either was not measured.
    """
    ours, theirs = results.median(row, results.ours), results.median(row, other)
    if ours is None or theirs is None:
        return None
    return ours - theirs if row.added else ours / theirs


def verdicts(results: Results) -> list[Verdict]:
    checked: list[Verdict] = []
    for row in results.rows:
        ours = results.median(row, results.ours)
        if row.limit is not None and ours is not None:
            checked.append(
                Verdict(row.name, f"<= {row.limit:g} {row.unit}", ours, ours <= row.limit)
            )
        for other, most in row.goals.items():
            value = compare(results, row, other)
            if value is not None:
                goal = (
                    f"<= {other} + {most:g} {row.unit}" if row.added else f"<= {most:g} x {other}"
                )
                checked.append(Verdict(row.name, goal, value, value <= most))
    return checked


def markdown(results: Results) -> str:
    others = [name for name in COLUMNS if name != results.ours]
    lines = [
        "| | unit | "
        + " | ".join(COLUMNS)
        + " | "
        + " | ".join(f"vs {name}" for name in others)
        + " |",
        "|---|---|" + "--:|" * (len(COLUMNS) + len(others)),
    ]
    for row in results.rows:
        numbers = [_format_value(results.median(row, name)) for name in COLUMNS]
        comparisons = [_format_comparison(results, row, name) for name in others]
        lines.append(f"| {row.name} | {row.unit} | " + " | ".join(numbers + comparisons) + " |")
    judgements = verdicts(results)
    if judgements:
        lines += ["", "| goal | required | measured | |", "|---|---|--:|---|"]
        lines += [
            f"| {v.row} | {v.goal} | {v.value:.2f} | {'met' if v.met else '**missed**'} |"
            for v in judgements
        ]
    if results.others:
        usual, worst = median(results.others), max(results.others)
        lines.append(
            f"\nOther processes used {usual:.0%} of the gateway's core in the median, "
            f"{worst:.0%} at worst."
        )
        if usual > MAX_OTHERS:
            lines.append(
                "**The machine was busy**: latencies are too high and chunks too cheap; "
                "measure again."
            )
    lines += [
        f"\nNot measured: {name}: {reason}" for name, reason in sorted(results.problems.items())
    ]
    return "\n".join(lines)


def _format_value(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _format_comparison(results: Results, row: Row, other: str) -> str:
    value = compare(results, row, other)
    return "" if value is None else f"{value:+.2f}" if row.added else f"{value:.2f}×"


def as_json(results: Results) -> dict[str, Any]:
    return {
        "settings": results.settings,
        "machine": {
            "cpu": cpu_name(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "samples": results.samples.get(row.name, {}),
                "medians": {name: results.median(row, name) for name in COLUMNS},
            }
            for row in results.rows
        ],
        "goals": [
            {"row": v.row, "goal": v.goal, "value": v.value, "met": v.met}
            for v in verdicts(results)
        ],
        "not_measured": results.problems,
        "others_on_gateway_core": results.others,
    }


def cpu_name() -> str:
    """Return the processor's name, as the kernel reports it.

    CPU times of different processors cannot be compared, but ratios can.
    """
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_docs(page: Path, results: Results) -> None:
    begin, end = "<!-- bench:begin -->", "<!-- bench:end -->"
    before, has_begin, remainder = page.read_text().partition(begin)
    _, has_end, after = remainder.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(
            f"the page {page} has no markers {begin} ... {end} between which the table belongs"
        )
    machine = f"Python {platform.python_version()}, {cpu_name()}, Linux {platform.release()}"
    caption = (
        f"Medians of {results.settings['rounds']} rounds; {machine}. {results.settings['built']}."
    )
    page.write_text(f"{before}{begin}\n{caption}\n\n{markdown(results)}\n{end}{after}")
