"""Percentiles and summaries of samples. Linear interpolation between closest ranks, as numpy's default."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """What is said of a set of samples, in their own unit."""

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
    """The value below which `percent` of the ascending samples lie. Raises ValueError when there are none."""
    if not ordered:
        raise ValueError("no samples")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low + (high - low) * (place - below)


def summarise(samples: Sequence[float]) -> Summary | None:
    """The Summary of samples in any order, None when there are none. `std` is that of the population."""
    if not samples:
        return None
    ordered = sorted(samples)
    mean = sum(ordered) / len(ordered)
    std = sqrt(sum((value - mean) ** 2 for value in ordered) / len(ordered))
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Summary(len(ordered), mean, std, ordered[0], p50, p90, p95, p99, ordered[-1])


def scaled(summary: Summary, factor: float) -> Summary:
    """The same samples in another unit."""
    values = {name: getattr(summary, name) * factor for name in summary.__struct_fields__ if name != "count"}
    return Summary(count=summary.count, **values)
