"""Confidence intervals for the medians that benchmarks report."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

CONFIDENCE = 0.95


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high): the median and its exact 95 % confidence interval.

    By order statistics, the interval [x(k), x(n+1-k)] covers the median with probability 1 - 2
    P(Binomial(n, 1/2) < k). With fewer than six values the whole range is returned, which then
    covers less than 95 %.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    below, rank = 0.0, 0
    while rank < count // 2 and 2 * (below + comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
        below += comb(count, rank) / 2**count
        rank += 1
    index = max(rank, 1) - 1
    return ordered[index], median(ordered), ordered[count - 1 - index]
