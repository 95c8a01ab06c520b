"""Quantile sketch: quantiles with 1 % relative error in bounded memory, from logarithmic buckets.

Bucket k counts values in (G**(k-1), G**k] with G = 1.01 / 0.99. One value, within 1 % of all values
in a bucket, stands for the bucket. Counts of several processes, or of two times, can be added and
subtracted bucket by bucket. Source: DDSketch (Masson, Rim, Lee; VLDB 2019), here with a fixed range
instead of collapsing buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log

RELATIVE_ERROR = 0.01
MIN_VALUE, MAX_VALUE = 1e-6, 1e5
"""The range of the sketch in seconds, divided into 1,268 buckets. Values outside are counted as the
nearest bound.
"""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
PER_LOG = 1 / log(_GROWTH)

BucketCounts = Mapping[int, int]
"""The number of observations by bucket number; empty buckets are absent."""

EMPTY: BucketCounts = {}


def bucket_of(value: float) -> int:
    """Return the number of the bucket that counts `value`, which is in seconds.

    metric_types.py repeats this code to save a function call per request.
    """
    return ceil(
        log(MIN_VALUE if value < MIN_VALUE else value if value < MAX_VALUE else MAX_VALUE) * PER_LOG
    )


def value_of(bucket: int) -> float:
    """Return the value that stands for a bucket: it is within 1 % of every value counted there."""
    return float(_GROWTH**bucket * (1 - RELATIVE_ERROR))


def quantile(counts: BucketCounts, share: float) -> float | None:
    """Return the quantile `share` (0 to 1) of a sketch's observations; None without observations.

    With 0.99, the result is the 99th percentile. `counts` are the sketch's bucket counts.
    """
    wanted, below = share * sum(counts.values()), 0
    for bucket in sorted(counts):
        below += counts[bucket]
        if below >= wanted:
            return value_of(bucket)
    return None


def merge_counts(parts: Iterable[BucketCounts]) -> BucketCounts:
    """Return the sum of several sketches' bucket counts, for quantiles of all observations.

    The mean of the sketches' own quantiles would be wrong.
    """
    total: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def difference(after: BucketCounts, before: BucketCounts) -> BucketCounts:
    """Return the bucket counts of the observations between two times: `after` minus `before`.

    If the sketch was reset between the two times, all of `after` is returned.
    """
    # To find a lost bucket, the keys are compared as sets: ten times as fast as a loop in Python.
    old = before.get
    grown = {bucket: added for bucket, count in after.items() if (added := count - old(bucket, 0))}
    was_reset = not before.keys() <= after.keys() or min(grown.values(), default=0) < 0
    return after if was_reset else grown


def round_seconds(seconds: float | None) -> float | None:
    """Return a duration in seconds, rounded to 10 us for display; None stays None."""
    return None if seconds is None else round(seconds, 5)
