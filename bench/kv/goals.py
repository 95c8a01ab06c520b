"""The goals of the KV benchmark, whether they are met, and the table of results.

Most goals compare our transport with another one. Each round gives a ratio, and the goal limits the
median of these ratios. If the other transport can both write and read, the faster one counts.
bench/kv/measure.py does the measurements.
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
    """The measured values of the KV benchmark, by transport, quantity and round.

    A round that failed has no value.
    """

    rounds: int
    samples: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def add(self, round_number: int, contestant: str, quantity: str, value: float) -> None:
        self.samples.setdefault((contestant, quantity), {})[round_number] = value

    def at(self, round_number: int, contestant: str, quantity: str) -> float | None:
        return self.samples.get((contestant, quantity), {}).get(round_number)

    def median(self, contestant: str, quantity: str) -> float | None:
        values = self.samples.get((contestant, quantity))
        return median(values.values()) if values else None


@dataclass(frozen=True)
class Goal:
    """One goal of the KV benchmark: a limit for the median of a quantity over all rounds.

    limit     the limit
    value     function that returns the value of a round, or None if the round failed
    at_least  True if the limit is a minimum, False if it is a maximum
    """

    name: str
    limit: float
    value: Callable[[Results, int], float | None]
    at_least: bool = True

    @property
    def requirement(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Verdict:
    """One goal of the KV benchmark, with its measured median and its lowest and highest round."""

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
    """Return a function that compares our transport with the best other one in a given round.

    ours      name of our transport
    peers     names of the others; the one with the highest value is the best
    quantity  the measured quantity

    The function returns our value divided by the best other value, or None if one is missing.
    """

    def value(results: Results, round_number: int) -> float | None:
        mine = results.at(round_number, ours, quantity)
        best = max(
            (v for peer in peers if (v := results.at(round_number, peer, quantity))), default=None
        )
        return mine / best if mine is not None and best is not None else None

    return value


def sample(contestant: str, quantity: str) -> Callable[[Results, int], float | None]:
    return lambda results, round_number: results.at(round_number, contestant, quantity)


# The bare loop: the same blocks by writev and readv, without frames, generations or permission.
BARE_LOOP, BARE_LOOP_XXH3 = "raw tcp, scattered", "raw tcp, scattered, xxh3"
OURS, OURS_XXH3 = "ours tcp, one lane", "ours tcp xxh3"  # the default number of lanes


def all_goals() -> list[Goal]:
    return [*_tcp_goals(), *_other_goals()]


def _tcp_goals() -> list[Goal]:
    # Return the goals for speed and CPU time of the tcp transport, compared with a bare loop and
    # with other systems.
    small, middle, large = SIZES
    write = NIXL_TCP[:1]
    return [
        Goal("64 KiB: tcp over the bare loop", 1.15, ratio(OURS, [BARE_LOOP], speed(middle))),
        Goal(
            "64 KiB: tcp with xxh3 over the bare loop with xxh3",
            1.15,
            ratio(OURS_XXH3, [BARE_LOOP_XXH3], speed(middle)),
        ),
        _at_most("64 KiB: CPU of tcp over the bare loop", 1.1, OURS, BARE_LOOP, cpu(middle)),
        _at_most(
            "64 KiB: CPU of tcp with xxh3 over the bare loop",
            1.45,
            OURS_XXH3,
            BARE_LOOP,
            cpu(middle),
        ),
        Goal("64 KiB: tcp over NIXL tcp write", 1.5, ratio(OURS, write, speed(middle))),
        _at_most("64 KiB: CPU of tcp over NIXL tcp write", 0.5, OURS, write[0], cpu(middle)),
        Goal("64 KiB: tcp over Mooncake tcp", 2.5, ratio(OURS, MOONCAKE_TCP, speed(middle))),
        Goal("4 KiB: tcp over NIXL tcp", 3.5, ratio(OURS, NIXL_TCP, speed(small))),
        Goal("2 MiB: tcp over NIXL tcp write", 1, ratio(OURS, write, speed(large))),
    ]


def _other_goals() -> list[Goal]:
    # Shared memory, latencies, a busy interpreter, and transfers by layers.
    _, middle, _ = SIZES
    return [
        Goal("64 KiB: shm over memcpy", 0.85, ratio("ours shm", ["memcpy"], speed(middle))),
        _at_most(
            "64 KiB: p50 of tcp over the bare loop", 1.2, OURS, BARE_LOOP, wait(middle, "p50")
        ),
        Goal(
            "64 KiB: request between agents, p50 µs",
            300,
            sample("ours agents tcp", wait(middle, "p50")),
            at_least=False,
        ),
        *(
            Goal(
                f"64 KiB: {ours}, busy thread over busy process{kind}",
                0.9,
                ratio(
                    f"ours {ours}, busy thread{kind}",
                    [f"ours {ours}, busy process{kind}"],
                    speed(middle),
                ),
            )
            for ours, kind in (("tcp", ""), ("tcp", ", 32 MiB windows"), ("agents tcp", ""))
        ),
        Goal(
            "layer-wise: exposed share of the transfer",
            0.15,
            sample("layer-wise", "exposed share"),
            at_least=False,
        ),
    ]


def _at_most(name: str, limit: float, ours: str, other: str, quantity: str) -> Goal:
    return Goal(name, limit, ratio(ours, [other], quantity), at_least=False)


def verdicts(results: Results) -> list[Verdict]:
    """Compare the results of the KV benchmark with its goals; return one verdict per goal."""
    checked = []
    for goal in all_goals():
        values = [
            v
            for round_number in range(results.rounds)
            if (v := goal.value(results, round_number)) is not None
        ]
        if values:
            checked.append(Verdict(goal, median(values), min(values), max(values)))
    return checked


def markdown(results: Results) -> str:
    """Return the report of the KV benchmark as Markdown.

    It has the results, the goals, and the transports that could not be measured.
    """
    names = list(
        dict.fromkeys(
            contestant for contestant, quantity in results.samples if quantity != "exposed share"
        )
    )
    columns = [name(size) for size in SIZES for name in (speed, cpu)]
    columns += [wait(size, cut) for size in WAITS for cut in ("p50", "p99")]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for contestant in sorted(names, key=_sort_key):
        cells = [_format_value(results.median(contestant, column)) for column in columns]
        lines.append(f"| {contestant} | " + " | ".join(cells) + " |")
    judgements = verdicts(results)
    if judgements:
        lines += [
            "",
            "| goal | required | measured | lowest and highest round | |",
            "|---|--:|--:|--:|---|",
        ]
        lines += [
            f"| {v.goal.name} | {v.goal.requirement} | {_format_value(v.value)} "
            f"| {_format_value(v.lowest)} to {_format_value(v.highest)} "
            f"| {'met' if v.met else '**missed**'} |"
            for v in judgements
        ]
    if results.others:
        usual, worst = median(results.others), max(results.others)
        lines.append(
            f"\nOther processes used {usual:.0%} of the machine in the median, "
            f"{worst:.0%} at worst."
        )
    lines += [
        f"\nNot measured: {name}: {reason}" for name, reason in sorted(results.problems.items())
    ]
    return "\n".join(lines)


def _sort_key(contestant: str) -> tuple[int, str]:
    order = ("ours", "memcpy", "raw", "nixl", "mooncake")
    return next(
        (i for i, word in enumerate(order) if contestant.startswith(word)), len(order)
    ), contestant


def _format_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
