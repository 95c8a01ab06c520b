"""Capacity: the highest load at which a policy keeps its promises, found by bisection. Knows nothing of replays."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

STRIDE = 1.5


class Capacity(msgspec.Struct, frozen=True):
    """`load` at which attainment crosses `target`; `tried`: (load, attainment) of every run made for it, in order.

    load 0.0: not even at the lowest load tried; the highest one where it held even there.
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
    """Bisect on a scale of ratios until the bracket is narrower than `tolerance`; the crossing is interpolated in it.

    `attainment(load)` is asked once per load. Attainment is taken to fall with load: where it wavers around the target,
    one of the crossings is found.
    """
    known: dict[float, float] = {}

    def holds(load: float) -> bool:
        known[load] = attainment(load)
        return known[load] >= target

    low = high = start
    if holds(start):
        while high < most:
            low, high = high, high * STRIDE
            if not holds(high):
                break
        else:
            return Capacity(high, target, tuple(known.items()))
    else:
        while low > least:
            high, low = low, low / STRIDE
            if holds(low):
                break
        else:
            return Capacity(0.0, target, tuple(known.items()))
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    above, below = known[low], known[high]
    crossing = low * (high / low) ** ((above - target) / (above - below))
    return Capacity(crossing, target, tuple(known.items()))
