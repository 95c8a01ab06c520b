"""Slow start: a new or returning endpoint gets only a few concurrent requests at first.

No request waits or is refused because of it: the filter below_cap (filters.py) only prefers other
endpoints while these have capacity. Envoy's slow start does the same with weights, which also grow
linearly and start at a tenth.
"""

from __future__ import annotations

from math import ceil

from policies.endpoint_load import NO_SOFT_CAP

LEAST = 0.1


def soft_cap(max_concurrency: int, warm_s: float, ramp_s: float) -> int:
    """Return the maximum number of concurrent requests for an endpoint that was recently started.

    max_concurrency  the endpoint's normal cap
    warm_s           seconds for which it has been in use
    ramp_s           seconds until the normal cap applies

    The result grows linearly from a tenth of `max_concurrency`, and is at least 1. After `ramp_s`
    seconds it is NO_SOFT_CAP.
    """
    if warm_s >= ramp_s:
        return NO_SOFT_CAP
    return max(1, ceil(max_concurrency * max(LEAST, warm_s / ramp_s)))
