"""A Prometheus histogram that counts values with one integer per bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class BucketHistogram:
    """A Prometheus histogram: the number of observed values per bucket, and the sum of the values.

    Each count is that of one bucket alone. Rendering makes the counts cumulative, as Prometheus
    demands.
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
