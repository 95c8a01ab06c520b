"""Computes percentiles and summaries of samples.

Percentiles are interpolated linearly between samples, as by numpy's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Statistics of a set of samples, in the samples' unit.

    `std` is the standard deviation of the population, and p50 to p99 are percentiles.
    """

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` percent of the sorted samples are.

    Raises ValueError if there are no samples.
    """
    if not ordered:
        raise ValueError("percentiles need at least one sample, but there are none")
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low + (high - low) * (rank - below)


def summarise(samples: Sequence[float]) -> Summary | None:
    """Return the Summary of samples in any order; None: there are no samples.

    `std` is the standard deviation of the population.
    """
    if not samples:
        return None
    ordered = sorted(samples)
    mean = sum(ordered) / len(ordered)
    std = sqrt(sum((value - mean) ** 2 for value in ordered) / len(ordered))
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Summary(len(ordered), mean, std, ordered[0], p50, p90, p95, p99, ordered[-1])


def convert_unit(summary: Summary, factor: float) -> Summary:
    """Return a copy with all values multiplied by `factor`, to change their unit."""
    values = {
        name: getattr(summary, name) * factor
        for name in summary.__struct_fields__
        if name != "count"
    }
    return Summary(count=summary.count, **values)
