"""Estimates the error of a mean over requests, from blocks of consecutive requests.

Requests that arrive close together wait in the same queues, so single requests are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import stdev
from typing import TypeVar

Item = TypeVar("Item")

BLOCKS = 8
T_95 = 2.36
"""Quantile of Student's t distribution for a 95 % interval that is computed from BLOCKS values."""


def in_blocks(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Split a sequence into BLOCKS consecutive parts of equal size.

    It must have that many items.
    """
    edges = [len(items) * block // BLOCKS for block in range(BLOCKS + 1)]
    return [items[begin:end] for begin, end in pairwise(edges)]


def error_of_mean(of_blocks: Sequence[float]) -> float:
    """Return the uncertainty of the mean of these values: half the width of its 95 % interval.

    of_blocks  one value for each of BLOCKS blocks of consecutive requests
    """
    return T_95 * stdev(of_blocks) / sqrt(len(of_blocks))
