"""Runs Python's garbage collector on a schedule instead of after a number of allocations.

Requests create no reference cycles (tests/unit/gateway/test_cycles.py). Therefore a collection
under load finds nothing, but stops a thousand streams for tens of milliseconds. Libraries do create
a few cycles, which Python would collect only after hours.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from gateway.util.memory_allocator import return_free_pages, return_large_blocks

# Requests in progress up to which a collection takes only a few milliseconds.
MAX_CALM_REQUESTS = 64
INTERVAL_S = 60.0
MAX_INTERVAL_S = 600.0  # collect after this time even under load

THRESHOLDS = 4000, 1, 1_000_000
"""The thresholds for gc.set_threshold(), by generation of objects.

1. Allocations (less deallocations) until the youngest objects are collected.
2. Such collections until the middle generation is collected too.
3. Never reached: the oldest objects are only collected by the schedule of this module.

Most objects of connections, pages and configurations survive a collection. The values keep each
collection within about a millisecond. A lower first value is reached by 32 requests at a time: with
1000, collections take 5 % of a request's time.
"""

MIDDLE_EVERY = 2
"""Number of calls of collect_young() after which one collects the middle generation too."""

YOUNG_CONNECTIONS = 16
"""Number of new client connections after which young objects are collected.

A connection has up to a hundred objects.
"""


def collect_and_trim() -> None:
    """Collect garbage, and return the pages that are free afterwards to the operating system."""
    gc.collect()
    return_free_pages()


class GcSchedule:
    """Decides when a gateway process collects garbage: at low load, or after a maximum interval."""

    def __init__(self, now: float, collect: Callable[[], object] = collect_and_trim) -> None:
        self._collected_at = now
        self._collect = collect
        self._calls = self._new_connections = 0

    def freeze(self) -> None:
        """Exempt all existing objects from garbage collection, and make automatic collections rare.

        Call this once at the end of startup, when all objects live as long as the process.
        """
        return_large_blocks()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def collect_young(self) -> None:
        """Collect garbage among the objects that were created since the last calls.

        Call this a few times per second, and count_connection() for each new client. Python itself
        would collect only after a number of allocations. Until then, a hundred thousand young
        objects could gather, and their collection would stop all streams for tens of milliseconds.
        """
        self._calls += 1
        gc.collect(0 if self._calls % MIDDLE_EVERY else 1)

    def count_connection(self) -> None:
        """Count a new client connection; collect young garbage after YOUNG_CONNECTIONS of them."""
        self._new_connections += 1
        if self._new_connections >= YOUNG_CONNECTIONS:
            self._new_connections = 0
            self.collect_young()

    def collect_if_due(self, now: float, in_progress: int) -> None:
        """Collect garbage after INTERVAL_S if load is low, and after MAX_INTERVAL_S in any case.

        now          monotonic time in seconds
        in_progress  number of running requests
        """
        elapsed_s = now - self._collected_at
        if elapsed_s >= MAX_INTERVAL_S or (
            elapsed_s >= INTERVAL_S and in_progress <= MAX_CALM_REQUESTS
        ):
            self._collected_at = now
            self._collect()
