"""Measures how CPU time grows with the amount of work, to detect more than linear growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time

FACTOR = 4
MOST_GROWTH = 8.0
"""Largest accepted growth of CPU time when the work grows by FACTOR.

Linear work grows by about FACTOR, quadratic work by FACTOR squared.
"""
TRIES = 3


def growth(work: Callable[[int], object], size: int) -> float:
    # Return the CPU time of `work(FACTOR * size)`, as a multiple of that of `work(size)`.
    #
    # Other processes share the core's caches, so the lowest time of several tries counts.
    small, large = (
        min(_cpu_s(work, number) for _ in range(TRIES)) for number in (size, FACTOR * size)
    )
    return large / small


def in_pieces(data: bytes, size: int) -> Sequence[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _cpu_s(work: Callable[[int], object], size: int) -> float:
    before = thread_time()
    work(size)
    return thread_time() - before
