"""A Prometheus histogram that counts values with one integer per bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class BucketHistogram:
    """A Prometheus histogram that is cheap to update: one integer per bucket, and the sum of the
    values.

    Each integer counts one bucket alone. The counts are added up only when they are written,
    because Prometheus wants each bucket to contain all lower ones.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {total}"
