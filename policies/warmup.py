"""Slow start: how many requests at once an endpoint that came, or came back, is given at first.

Lives here: the ramp. Not here: that nobody waits or is refused for its sake; below_cap (filters.py) only prefers others
while they have room. Envoy's slow start is the like for weights: time over the window, never below a tenth.
"""

from __future__ import annotations

from math import ceil

from policies.load import NO_CEILING

LEAST = 0.1


def ceiling(max_concurrency: int, warm_s: float, ramp_s: float) -> int:
    """Requests at once for one that has been asked for `warm_s` seconds; NO_CEILING once the ramp is over.

    It grows evenly from a tenth of its cap, and is never below one.
    """
    if warm_s >= ramp_s:
        return NO_CEILING
    return max(1, ceil(max_concurrency * max(LEAST, warm_s / ramp_s)))
