"""Quantiles of many observations within 1 % of each value, in bounded memory: counts in logarithmic buckets.

Bucket k holds values in (G**(k-1), G**k] with G = 1.01 / 0.99. A bucket is shown as the value that is
within 1 % of all it holds. Counts of several processes or moments are added and subtracted per bucket.
Source: DDSketch (Masson, Rim, Lee; VLDB 2019), here with a fixed range in place of collapsing buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log

RELATIVE_ERROR = 0.01
LEAST, MOST = 1e-6, 1e5
"""Values outside are counted as these: a microsecond and a day, in seconds. At most 1,268 buckets."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
PER_LOG = 1 / log(_GROWTH)

Counts = Mapping[int, int]
"""Observations by bucket; buckets without any are absent."""

NONE: Counts = {}


def bucket_of(value: float) -> int:
    """The bucket that counts `value`. meters.py repeats this to save a call per request."""
    return ceil(log(LEAST if value < LEAST else value if value < MOST else MOST) * PER_LOG)


def value_of(bucket: int) -> float:
    """The value that a bucket is shown as: at most 1 % from every value in it."""
    return float(_GROWTH**bucket * (1 - RELATIVE_ERROR))


def quantile(counts: Counts, share: float) -> float | None:
    """The smallest value with at least `share` of the observations at or below it; None without observations."""
    wanted, below = share * sum(counts.values()), 0
    for bucket in sorted(counts):
        below += counts[bucket]
        if below >= wanted:
            return value_of(bucket)
    return None


def merged(parts: Iterable[Counts]) -> Counts:
    """The observations of all parts: quantiles are of all of them, never a mean of quantiles."""
    total: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def grown(after: Counts, before: Counts) -> Counts:
    """Observations between two moments of one sketch. One that began again counts from nothing."""
    if any(count > after.get(bucket, 0) for bucket, count in before.items()):
        return after
    return {bucket: more for bucket, count in after.items() if (more := count - before.get(bucket, 0))}


def rounded(seconds: float | None) -> float | None:
    """To 10 us, for people and JSON; None stays None."""
    return None if seconds is None else round(seconds, 5)
