"""The results of policies on random workloads, and which routing rule was the best on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

import msgspec

from bench.zoo.measure import LOWEST, STEP

LEAST = STEP**LOWEST
"""Capacity that is assumed for one below the lowest load of the grid: this load."""


class Result(msgspec.Struct, frozen=True):
    """How well one routing policy served one random workload.

    It has the share of requests in time by step of the load, and the highest load at which each
    required share, such as "0.9", is reached.

    code     hash of the measured source code
    dropped  why the workload is left out; "" if it counts
    """

    seed: str
    number: int
    arrivals: int
    policy: str
    attainment: dict[int, float]
    capacity: dict[str, float]
    cpu_s: float = 0.0
    code: str = ""
    dropped: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.seed, self.number, self.arrivals, self.policy

    def load(self, target: str) -> float:
        return max(LEAST, self.capacity[target])

    def covers(self, targets: Iterable[float], steps: Iterable[int]) -> bool:
        return all(f"{target:g}" in self.capacity for target in targets) and all(
            step in self.attainment for step in steps
        )


def best_rules(results: Sequence[Result], count: int) -> list[str]:
    ranked = sorted(results, key=lambda result: -result.capacity["0.9"])
    return [result.policy for result in ranked[:count]]


def reference_step(results: Iterable[Result]) -> int:
    return round(log(max(result.load("0.9") for result in results)) / log(STEP))
