"""Finds the capacity of a policy by bisection: the highest load at which it meets its target.

The search does not depend on how loads are replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

STRIDE = 1.5


class Capacity(msgspec.Struct, frozen=True):
    """The highest load at which the share `target` of requests meets the latency budgets.

    load    the load; 0.0 if the target is missed at the lowest load tried. If it is met at all
            loads tried, the highest of them
    target  the share, 0 to 1
    tried   (load, attainment) of every run, in order
    """

    load: float
    target: float
    tried: tuple[tuple[float, float], ...]


def capacity(
    attainment: Callable[[float], float],
    target: float = 0.9,
    start: float = 1.0,
    tolerance: float = 0.02,
    least: float = 1 / 64,
    most: float = 64.0,
) -> Capacity:
    """Find the load at which the function `attainment` crosses `target`, by bisection.

    attainment  function of a load, assumed to fall as the load rises
    target      share, 0 to 1
    start       the first load tried
    tolerance   relative width of the interval at which the bisection ends
    least       lowest load tried
    most        highest load tried

    Loads are on a logarithmic scale, and the result is interpolated. If `attainment` crosses the
    target several times, one of these loads is returned.
    """
    known: dict[float, float] = {}

    def meets_target(load: float) -> bool:
        known[load] = attainment(load)
        return known[load] >= target

    low, high = _bracket(meets_target, start, least, most)
    if low == high:
        return Capacity(low, target, tuple(known.items()))
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets_target(middle) else (low, middle)
    above, below = known[low], known[high]
    crossing = low * (high / low) ** ((above - target) / (above - below))
    return Capacity(crossing, target, tuple(known.items()))


def _bracket(
    meets_target: Callable[[float], bool], start: float, least: float, most: float
) -> tuple[float, float]:
    # Return two loads, of which the lower one meets the target and the higher one does not.
    #
    # If no load meets it, both are 0; if all do, both are the highest load that was tried.
    low = high = start
    if meets_target(start):
        while high < most:
            low, high = high, high * STRIDE
            if not meets_target(high):
                return low, high
        return high, high
    while low > least:
        high, low = low, low / STRIDE
        if meets_target(low):
            return low, high
    return 0.0, 0.0
