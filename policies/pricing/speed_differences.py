"""Decides which differences between the speeds of endpoints count, beyond noise and wrong labels.

Learned speeds of equal endpoints differ by noise, and a label may name a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

from policies.endpoint_load import EndpointLoad
from policies.engine.first_token_calibration import SHORT_S
from policies.engine.step_time import PRIOR_VAR, SpeedFactor
from policies.routing_types import Candidate

SIGMAS = 2.0
"""Number of standard deviations up to which differences between learned speeds count as noise."""

SLOW_LABEL = 2.0
"""Ratio of prefill times by label from which on an endpoint that was never observed is tested."""

TEST_S = 2.0 * SHORT_S
"""Seconds of prefill from which on a single prompt always shows the speed of an endpoint."""

PASSED = 32
"""Number of requests that pass an idle endpoint by before one is risked to test its label."""

UNOBSERVED = SpeedFactor(1.0, PRIOR_VAR)


def equalize_speeds(speeds: Sequence[SpeedFactor], most: float) -> list[float]:
    """Return factors that bring each learned speed closer to the median, limited by `most` and by
    the speed's uncertainty.

    Learned speeds of equal endpoints differ by noise, and only differences beyond the noise should
    count. Otherwise the endpoint that seems slightly faster would get all work. An endpoint without
    observations would also get it if the others are slower than estimated, and under so much
    prefill its decode speed could not be observed.
    """
    if not speeds:
        return []
    factors = [factor for factor, _ in speeds]
    ordered = sorted(factors)
    middle = ordered[len(ordered) // 2]
    corrections = list(map(middle.__truediv__, factors))
    if ordered[-1] <= most * middle <= most * most * ordered[0]:
        return corrections
    bounds = [most * exp(SIGMAS * sqrt(var)) for _, var in speeds]
    return [
        min(limit, max(1.0 / limit, correction))
        for correction, limit in zip(corrections, bounds, strict=True)
    ]


def slow_by_label(candidates: Sequence[Candidate]) -> list[int]:
    """Return the indexes of endpoints that only their labels call slow: they were never observed.

    Slow is SLOW_LABEL times the prefill time per token of the candidate with the quickest label.
    """
    token_s = [candidate.load.belief.shape.token_s for candidate in candidates]
    most_s = SLOW_LABEL * min(token_s, default=0.0)
    return [
        index
        for index, candidate in enumerate(candidates)
        if token_s[index] > most_s and not was_observed(candidate.load)
    ]


def was_observed(load: EndpointLoad) -> bool:
    """Return whether the speed of prefill has been observed at an endpoint."""
    return load.belief.speeds.prefill != UNOBSERVED


class LateTests:
    """Decides when the label of an idle endpoint is tested by a request that it says would be late.

    A label that lets no request be in time is never tested by one that is in time, and the endpoint
    would stay idle for ever if the label is wrong. So once PASSED requests have passed the endpoint
    by, one is risked: at most one of PASSED, and one that the label makes no later than most.
    """

    # _passed: by slot, the number of requests since the last test, and the sum of how late the
    # label says they would have been, in budgets
    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed: dict[int, tuple[int, float]] = {}

    def is_due(self, slot: int, lateness: float) -> bool:
        """Return whether to test the endpoint with a request, and count the request if not.

        The test stays due until `forget` is called: a pick may be repeated for the same request.
        """
        count, total = self._passed.get(slot, (0, 0.0))
        if count >= PASSED and lateness * count <= total:
            return True
        self._passed[slot] = count + 1, total + lateness
        return False

    def forget(self, slot: int) -> None:
        """Start to count again, because the endpoint has got a request."""
        self._passed.pop(slot, None)
