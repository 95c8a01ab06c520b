"""From samples to a table: medians, ratios to the peers, goals met or missed. No measuring here."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cells import Row
from systems import OURS, SOURCES

COLUMNS = (OURS, SOURCES, "sglang-router", "vllm-router", "nginx", "direct")
QUIET = 0.05  # more of the gateway's core than this to others, and the numbers are about them too


@dataclass
class Results:
    """Samples by row and system, in the order they were taken, and what could not be measured and why."""

    rows: list[Row]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def add(self, row: Row, system: str, value: float) -> None:
        self.samples.setdefault(row.name, {}).setdefault(system, []).append(value)

    @property
    def ours(self) -> str:
        """Which of us is judged: compiled, as the image has it; the sources alone where that was not measured."""
        measured = {system for systems in self.samples.values() for system in systems}
        return SOURCES if SOURCES in measured and OURS not in measured else OURS

    def median(self, row: Row, system: str) -> float | None:
        """The median of the rounds, None where the system was not measured."""
        values = self.samples.get(row.name, {}).get(system)
        return median(values) if values else None


@dataclass(frozen=True)
class Verdict:
    """One goal of one row: what was asked, what came out."""

    row: str
    goal: str
    value: float
    met: bool


def compare(results: Results, row: Row, other: str) -> float | None:
    """Our number beside another system's: the ratio, or for latencies the difference."""
    ours, theirs = results.median(row, results.ours), results.median(row, other)
    if ours is None or theirs is None:
        return None
    return ours - theirs if row.added else ours / theirs


def verdicts(results: Results) -> list[Verdict]:
    """Every goal that could be judged."""
    found: list[Verdict] = []
    for row in results.rows:
        ours = results.median(row, results.ours)
        if row.limit is not None and ours is not None:
            found.append(Verdict(row.name, f"<= {row.limit:g} {row.unit}", ours, ours <= row.limit))
        for other, most in row.goals.items():
            value = compare(results, row, other)
            if value is not None:
                goal = (
                    f"<= {other} + {most:g} {row.unit}" if row.added else f"<= {most:g} x {other}"
                )
                found.append(Verdict(row.name, goal, value, value <= most))
    return found


def markdown(results: Results) -> str:
    """The table as it stands in the docs: medians, then our number beside each peer's, then the goals."""
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
        numbers = [_number(results.median(row, name)) for name in COLUMNS]
        beside = [_beside(results, row, name) for name in others]
        lines.append(f"| {row.name} | {row.unit} | " + " | ".join(numbers + beside) + " |")
    judged = verdicts(results)
    if judged:
        lines += ["", "| goal | asked | measured | |", "|---|---|--:|---|"]
        lines += [
            f"| {v.row} | {v.goal} | {v.value:.2f} | {'met' if v.met else '**missed**'} |"
            for v in judged
        ]
    if results.others:
        usual, worst = median(results.others), max(results.others)
        lines.append(
            f"\nOther processes had {usual:.0%} of the gateway's core in the median, {worst:.0%} at worst."
        )
        if usual > QUIET:
            lines.append(
                "**The machine was not quiet**: latencies are too high and chunks too cheap; take it again."
            )
    lines += [
        f"\nNot measured: {name}: {reason}" for name, reason in sorted(results.problems.items())
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _beside(results: Results, row: Row, other: str) -> str:
    value = compare(results, row, other)
    return "" if value is None else f"{value:+.2f}" if row.added else f"{value:.2f}×"


def as_json(results: Results) -> dict[str, Any]:
    """Everything: every sample, the medians, the goals."""
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
    """As the kernel calls it; CPU figures of different machines cannot be compared, ratios can."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_docs(page: Path, results: Results) -> None:
    """Replaces what stands between the markers of a page."""
    begin, end = "<!-- bench:begin -->", "<!-- bench:end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    if not found or not ends:
        raise SystemExit(f"{page} has no {begin} ... {end}")
    machine = f"Python {platform.python_version()}, {cpu_name()}, Linux {platform.release()}"
    taken = (
        f"Medians of {results.settings['rounds']} rounds; {machine}. {results.settings['built']}."
    )
    page.write_text(f"{before}{begin}\n{taken}\n\n{markdown(results)}\n{end}{after}")
