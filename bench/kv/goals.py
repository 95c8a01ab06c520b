"""What is asked of the transfer, and whether it came out so: medians over rounds of the ratio within a round.

A goal against a peer counts against its best way (WRITE or READ) of the same round. No measuring here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

SIZES = {4 << 10: "4 KiB", 64 << 10: "64 KiB", 2 << 20: "2 MiB"}
WAITS = (64 << 10, 4 << 10)
NIXL_TCP, MOONCAKE_TCP = (
    ("nixl tcp write", "nixl tcp read"),
    ("mooncake tcp write", "mooncake tcp read"),
)


@dataclass
class Results:
    """One number a round by (contestant, quantity); a round in which it failed has none."""

    rounds: int
    samples: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def add(self, turn: int, who: str, quantity: str, value: float) -> None:
        self.samples.setdefault((who, quantity), {})[turn] = value

    def at(self, turn: int, who: str, quantity: str) -> float | None:
        return self.samples.get((who, quantity), {}).get(turn)

    def median(self, who: str, quantity: str) -> float | None:
        values = self.samples.get((who, quantity))
        return median(values.values()) if values else None


@dataclass(frozen=True)
class Goal:
    """`value(results, round)` of every round, whose median must be at least or at most `limit`."""

    name: str
    limit: float
    value: Callable[[Results, int], float | None]
    at_least: bool = True

    @property
    def asked(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Verdict:
    """A goal with what was measured: lowest and highest round beside the median."""

    goal: Goal
    value: float
    lowest: float
    highest: float

    @property
    def met(self) -> bool:
        return (
            self.value >= self.goal.limit if self.goal.at_least else self.value <= self.goal.limit
        )


def speed(block_bytes: int) -> str:
    return f"{SIZES[block_bytes]} GB/s"


def cpu(block_bytes: int) -> str:
    return f"{SIZES[block_bytes]} CPU-s/GB"


def wait(block_bytes: int, cut: str) -> str:
    return f"{SIZES[block_bytes]} {cut} µs"


def ratio(ours: str, peers: Iterable[str], quantity: str) -> Callable[[Results, int], float | None]:
    """Ours over the best of the peers in the same round."""

    def value(results: Results, turn: int) -> float | None:
        mine = results.at(turn, ours, quantity)
        best = max((v for peer in peers if (v := results.at(turn, peer, quantity))), default=None)
        return mine / best if mine is not None and best is not None else None

    return value


def plain(who: str, quantity: str) -> Callable[[Results, int], float | None]:
    return lambda results, turn: results.at(turn, who, quantity)


def all_goals() -> list[Goal]:
    """Tcp against peers and wire, processor time, shared memory, latency, layer-wise."""
    small, middle, large = SIZES
    return [
        Goal("64 KiB: tcp over NIXL tcp", 2, ratio("ours tcp", NIXL_TCP, speed(middle))),
        Goal("64 KiB: tcp over Mooncake tcp", 2, ratio("ours tcp", MOONCAKE_TCP, speed(middle))),
        Goal("64 KiB: tcp over raw tcp", 0.95, ratio("ours tcp", ["raw tcp"], speed(middle))),
        Goal(
            "64 KiB: tcp with xxh3 over raw tcp",
            0.85,
            ratio("ours tcp xxh3", ["raw tcp"], speed(middle)),
        ),
        Goal("64 KiB: tcp, CPU-s/GB", 0.30, plain("ours tcp", cpu(middle)), at_least=False),
        Goal(
            "64 KiB: tcp with xxh3, CPU-s/GB",
            0.35,
            plain("ours tcp xxh3", cpu(middle)),
            at_least=False,
        ),
        Goal(
            "64 KiB: tcp with AES-GCM, CPU-s/GB",
            0.55,
            plain("ours tcp aes", cpu(middle)),
            at_least=False,
        ),
        Goal("4 KiB: tcp over NIXL tcp", 4, ratio("ours tcp", NIXL_TCP, speed(small))),
        Goal("4 KiB: tcp over Mooncake tcp", 4, ratio("ours tcp", MOONCAKE_TCP, speed(small))),
        Goal("2 MiB: tcp over NIXL tcp write", 1, ratio("ours tcp", NIXL_TCP[:1], speed(large))),
        Goal("2 MiB: tcp over NIXL tcp read", 2.5, ratio("ours tcp", NIXL_TCP[1:], speed(large))),
        Goal("64 KiB: shm over memcpy", 0.85, ratio("ours shm", ["memcpy"], speed(middle))),
        Goal("64 KiB: tcp, p50 µs", 20, plain("ours tcp", wait(middle, "p50")), at_least=False),
        Goal("64 KiB: tcp, p99 µs", 150, plain("ours tcp", wait(middle, "p99")), at_least=False),
        Goal("4 KiB: tcp, p50 µs", 10, plain("ours tcp", wait(small, "p50")), at_least=False),
        Goal(
            "layer-wise: exposed share of the transfer",
            0.15,
            plain("layer-wise", "exposed share"),
            at_least=False,
        ),
    ]


def verdicts(results: Results) -> list[Verdict]:
    """Every goal for which there was something in some round."""
    found = []
    for goal in all_goals():
        values = [
            v for turn in range(results.rounds) if (v := goal.value(results, turn)) is not None
        ]
        if values:
            found.append(Verdict(goal, median(values), min(values), max(values)))
    return found


def markdown(results: Results) -> str:
    """The table of contestants, then the goals, then what could not be measured."""
    names = list(
        dict.fromkeys(who for who, quantity in results.samples if quantity != "exposed share")
    )
    columns = [name(size) for size in SIZES for name in (speed, cpu)]
    columns += [wait(size, cut) for size in WAITS for cut in ("p50", "p99")]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for who in sorted(names, key=_place):
        cells = [_number(results.median(who, column)) for column in columns]
        lines.append(f"| {who} | " + " | ".join(cells) + " |")
    judged = verdicts(results)
    if judged:
        lines += [
            "",
            "| goal | asked | measured | lowest and highest round | |",
            "|---|--:|--:|--:|---|",
        ]
        lines += [
            f"| {v.goal.name} | {v.goal.asked} | {_number(v.value)} | {_number(v.lowest)} to {_number(v.highest)} "
            f"| {'met' if v.met else '**missed**'} |"
            for v in judged
        ]
    if results.others:
        usual, worst = median(results.others), max(results.others)
        lines.append(
            f"\nOther processes used {usual:.0%} of the machine in the median, {worst:.0%} at worst."
        )
    lines += [
        f"\nNot measured: {name}: {reason}" for name, reason in sorted(results.problems.items())
    ]
    return "\n".join(lines)


def _place(who: str) -> tuple[int, str]:
    """Ours first, then the floors, then the peers."""
    order = ("ours", "memcpy", "raw", "nixl", "mooncake")
    return next((i for i, word in enumerate(order) if who.startswith(word)), len(order)), who


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
