"""When Python's collector looks for reference cycles: by the clock, hardly ever because much was allocated.

Requests leave no cycles behind (tests/unit/gateway/test_cycles.py), so looking while many are under way finds nothing,
and holds all of them up, tens of milliseconds for a thousand streams. What libraries leave is little, since probes let
go of their errors: a file that was read. Counting allocations would come to it after hours, and memory grow until then.
And bodies of all sizes leave holes between what stays, which the allocator keeps unless it is asked.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

CALM = 64  # requests under way, at most: looking then takes a few milliseconds
EVERY_S = 60.0
MAPPED, KEPT = 256 * 1024, 4 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
AT_LATEST_S = 600.0


def tidy() -> None:
    """Look, and give back the free pages that lie between others: only glibc can be asked to."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_large() -> None:
    """Have the allocator give the memory of a large body back as soon as it is freed.

    By itself glibc keeps up to 64 MiB of it once one was freed. Only glibc can be asked to.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, MAPPED)
        tune(_M_TRIM_THRESHOLD, KEPT)


class Litter:
    """The collector of one gateway. One owner: the sweep."""

    def __init__(self, now: float, collect: Callable[[], object] = tidy) -> None:
        self._looked_at = now
        self._collect = collect

    def settle(self) -> None:
        """What exists now lives as long as the process: the collector need not walk it, nor look often."""
        give_back_large()
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)

    def sweep(self, now: float, under_way: int) -> None:
        """Look, if it is time and calm, or high time."""
        since_s = now - self._looked_at
        if since_s >= AT_LATEST_S or (since_s >= EVERY_S and under_way <= CALM):
            self._looked_at = now
            self._collect()
