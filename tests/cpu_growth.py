"""Measures how CPU time grows with the amount of work, to detect more than linear growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import thread_time

FACTOR = 4
MOST_GROWTH = 8.0
"""Largest accepted growth of CPU time when the work grows by FACTOR.

Linear work grows by about FACTOR, quadratic work by FACTOR squared.
"""
TRIES = 3
ROUNDS = 5


def growth(work: Callable[[int], object], size: int) -> float:
    # Return the CPU time of `work(FACTOR * size)`, as a multiple of that of `work(size)`.
    #
    # Other processes share the core's caches, so the lowest time of several tries counts. If these
    # show more growth than is accepted, there are more rounds of tries: a process that computes on
    # the core's other thread slows down all tries of one round, but not of five.
    small = large = inf
    for _ in range(ROUNDS):
        small = min(small, *(_cpu_s(work, size) for _ in range(TRIES)))
        large = min(large, *(_cpu_s(work, FACTOR * size) for _ in range(TRIES)))
        if large < MOST_GROWTH * small:
            break
    return large / small


def in_pieces(data: bytes, size: int) -> Sequence[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _cpu_s(work: Callable[[int], object], size: int) -> float:
    before = thread_time()
    work(size)
    return thread_time() - before
