"""Confidence intervals of medians and means, and lines through values, that benchmarks report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median

CONFIDENCE = 0.95
_STUDENT_T = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31),
    *(2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
)


def student_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution, for two-sided 95% intervals.

    freedom  degrees of freedom, at least 1. Above 15, the value for 15 is returned, which makes
             intervals up to 9% too wide
    """
    return _STUDENT_T[min(freedom, len(_STUDENT_T)) - 1]


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high): the median of the values and its 95% confidence interval.

    The interval consists of order statistics and assumes no distribution: [x(k), x(n+1-k)] contains
    the true median with probability 1 - 2 P(Binomial(n, 1/2) < k). For fewer than six values it is
    the whole range, which contains the median with a probability below 95%.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    below, rank = 0.0, 0
    while rank < count // 2 and 2 * (below + comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
        below += comb(count, rank) / 2**count
        rank += 1
    index = max(rank, 1) - 1
    return ordered[index], median(ordered), ordered[count - 1 - index]


def fitted_line(points: Mapping[int, float]) -> tuple[float, float, float]:
    """Return (slope, intercept, deviation) of the line with the least squares through points.

    The deviation is the largest distance of a point from the line, relative to the point.
    """
    middle_x, middle_y = sum(points) / len(points), sum(points.values()) / len(points)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points.items()) / sum(
        (x - middle_x) ** 2 for x in points
    )
    intercept = middle_y - slope * middle_x
    return slope, intercept, max(abs(intercept + slope * x - y) / y for x, y in points.items())
