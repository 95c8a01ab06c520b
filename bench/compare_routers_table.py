"""Formats the results of `make bench`: medians, ratios to other gateways, and whether goals are
met.

The measurements are in bench/traffic_cells.py.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from compared_systems import OURS, SOURCES
from confidence_intervals import median_interval
from traffic_cells import Row

COLUMNS = (OURS, SOURCES, "sglang-router", "vllm-router", "smg", "nginx", "direct")
MAX_OTHERS = 0.05
"""Maximum share (0 to 1) of the gateway's core that other processes may use in a valid run."""


@dataclass
class Results:
    """The values that `make bench` measured, by row of the table, gateway and round."""

    rows: list[Row]
    samples: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def add(self, row: Row, system: str, round_number: int, value: float) -> None:
        self.samples.setdefault(row.name, {}).setdefault(system, {})[round_number] = value

    @property
    def ours(self) -> str:
        """Return which build of Penstock must meet the goals: the compiled one, if it was measured.

        Otherwise it is the gateway from Python sources.
        """
        measured = {system for systems in self.samples.values() for system in systems}
        return SOURCES if SOURCES in measured and OURS not in measured else OURS

    def median(self, row: Row, system: str) -> float | None:
        values = self.samples.get(row.name, {}).get(system)
        return median(values.values()) if values else None


@dataclass(frozen=True)
class Comparison:
    """How our gateway compares with another one in one row of the table, with a 95 % interval.

    The value is the median, over the rounds, of the ratio of both gateways' values. In a row with
    `added`, differences are used instead of ratios.
    """

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """Whether one goal of a row of the result table was met.

    value  the measured value
    met    whether it meets the goal
    """

    row: str
    goal: str
    value: float
    met: bool


def compare(results: Results, row: Row, other: str) -> Comparison | None:
    """Compare Penstock's values with those of another gateway, round by round.

    Returns None if no round has both values.

    results  the measurements of all gateways
    row      the quantity to compare
    other    name of the other gateway
    """
    samples = results.samples.get(row.name, {})
    ours, theirs = samples.get(results.ours, {}), samples.get(other, {})
    pairs = [(ours[number], theirs[number]) for number in ours.keys() & theirs.keys()]
    if not pairs:
        return None
    return Comparison(*median_interval([a - b if row.added else a / b for a, b in pairs]))


def verdicts(results: Results) -> list[Verdict]:
    checked: list[Verdict] = []
    for row in results.rows:
        ours = results.median(row, results.ours)
        if row.limit is not None and ours is not None:
            checked.append(
                Verdict(row.name, f"<= {row.limit:g} {row.unit}", ours, ours <= row.limit)
            )
        for other, most in row.goals.items():
            found = compare(results, row, other)
            if found is not None:
                goal = (
                    f"<= {other} + {most:g} {row.unit}" if row.added else f"<= {most:g} x {other}"
                )
                checked.append(Verdict(row.name, goal, found.value, found.value <= most))
    return checked


def markdown(results: Results) -> str:
    """Return the results as Markdown: medians, comparisons, goals, and warnings."""
    others = [name for name in COLUMNS if name != results.ours]
    lines = _table(
        ["", "unit", *COLUMNS],
        [
            [row.name, row.unit, *(_format_value(results.median(row, name)) for name in COLUMNS)]
            for row in results.rows
        ],
    )
    lines += [f"\n{results.ours} beside the others, median of paired rounds (95 % interval):\n"]
    lines += _table(
        ["", *(f"vs {name}" for name in others)],
        [
            [row.name, *(_format_comparison(results, row, name) for name in others)]
            for row in results.rows
        ],
    )
    lines += _goal_lines(results)
    lines += _doubt_lines(results)
    return "\n".join(lines)


def _goal_lines(results: Results) -> list[str]:
    judgements = verdicts(results)
    if not judgements:
        return []
    return ["", "| goal | required | measured | |", "|---|---|--:|---|"] + [
        f"| {v.row} | {v.goal} | {v.value:.2f} | {'met' if v.met else '**missed**'} |"
        for v in judgements
    ]


def _doubt_lines(results: Results) -> list[str]:
    # Return how busy the machine was otherwise, and what could not be measured.
    lines = []
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
    return lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    # Return the lines of a Markdown table with numbers in all columns but the first.
    cells = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _format_value(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _format_comparison(results: Results, row: Row, other: str) -> str:
    found = compare(results, row, other)
    if found is None:
        return ""
    if row.added:
        return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
    return f"{found.value:.2f}× ({found.low:.2f} to {found.high:.2f})"


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
    """Return the name of the processor, from /proc/cpuinfo.

    It is printed because CPU times of different processors cannot be compared, but ratios can.
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
            f"the page {page} lacks the comments {begin} ... {end}, between which the table "
            "is written; add them"
        )
    machine = f"Python {platform.python_version()}, {cpu_name()}, Linux {platform.release()}"
    caption = (
        f"Medians of {results.settings['rounds']} rounds; {machine}. {results.settings['built']}."
    )
    page.write_text(f"{before}{begin}\n{caption}\n\n{markdown(results)}\n{end}{after}")
