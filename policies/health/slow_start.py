"""Slow start: how many concurrent requests a new or returning endpoint gets at first.

Contains the ramp only. No request waits or is refused because of it: below_cap (filters.py) merely
prefers other endpoints while they have room. Envoy's slow start is similar, for weights: linear
over the window, never below a tenth.
"""

from __future__ import annotations

from math import ceil

from policies.load import NO_SOFT_CAP

LEAST = 0.1


def soft_cap(max_concurrency: int, warm_s: float, ramp_s: float) -> int:
    """Return the soft cap of an endpoint in rotation for `warm_s` seconds.

    NO_SOFT_CAP once the ramp is over.

    It grows linearly from a tenth of the cap, and is at least 1.
    """
    if warm_s >= ramp_s:
        return NO_SOFT_CAP
    return max(1, ceil(max_concurrency * max(LEAST, warm_s / ramp_s)))
