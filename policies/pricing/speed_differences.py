"""Decides which differences between the speeds of endpoints count, beyond noise and wrong labels.

Learned speeds of equal endpoints differ by noise, and a label may name a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt

from policies.endpoint_load import EndpointLoad
from policies.engine.first_token_calibration import SHORT_S
from policies.engine.step_time import PRIOR_VAR, SpeedBelief, SpeedFactor, UsualSpeeds
from policies.routing_types import Candidate

SIGMAS = 2.0
"""Number of standard deviations up to which differences between learned speeds count as noise."""

SLOW_LABEL = 2.0
"""Ratio of prefill times by label from which on an endpoint that was never observed is tested."""

TEST_S = 2.0 * SHORT_S
"""Seconds of prefill from which on a single prompt always shows the speed of an endpoint."""

PASSED = 32
"""Number of requests that pass idle endpoints by before one is risked to test a label."""

ROUNDED = 1.0 + 1e-9
"""Factor on a sum that may have been rounded down many times."""

UNOBSERVED = SpeedFactor(1.0, PRIOR_VAR)


def equalize_speeds(speeds: Sequence[SpeedFactor], most: float) -> list[float]:
    """Return factors that make endpoints of about the same learned speed count as equally fast.

    Learned speeds of equal endpoints differ by noise. If noise counted, the endpoint that seems
    slightly faster would get all work. The same holds for an endpoint without observations, if the
    others are slower than estimated. The factors move each speed towards the median of all.

    speeds  the learned speeds
    most    if a speed differs from the median by more than this factor, the excess still counts
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
    """Return the indexes of endpoints that count as slow only because their label names a slow GPU.

    Their real speed was never observed. By its label, a slow endpoint needs more than SLOW_LABEL
    times as long per prompt token as the quickest candidate.
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


def was_measured(speeds: UsualSpeeds) -> bool:
    """Return whether prefill and decode steps of an endpoint have been observed."""
    return UNOBSERVED not in (speeds.prefill, speeds.step)


def was_ever_observed(speeds: UsualSpeeds) -> bool:
    """Return whether prefill or decode steps of an endpoint have been observed."""
    return speeds.prefill != UNOBSERVED or speeds.step != UNOBSERVED


LateLabel = tuple[EndpointLoad, float]
"""An endpoint whose label says that a request would be late there, and how late: the largest share
of a budget that it would take."""


class LateTests:
    """Decides when an idle endpoint gets a request to test whether its label "slow GPU" is true.

    By its label, such an endpoint would be late for every request, so it gets none. If the label is
    wrong, it would stay idle forever. So once PASSED requests have gone elsewhere, one request is
    sent there that would not be later than most. All endpoints together get at most one test per
    PASSED requests.
    """

    # _passed: by slot, the belief that is to be tested, the number of requests since the last test,
    # and the sum of how late the label says they would have been, in budgets. A new endpoint in a
    # slot has another belief
    # _decided: by id, the newest requests, and the slot where each was risked; -1: nowhere
    # _since: number of requests since one was risked
    __slots__ = ("_decided", "_passed", "_since")

    def __init__(self) -> None:
        self._passed: dict[int, tuple[SpeedBelief, int, float]] = {}
        self._decided: dict[str, int] = {}
        self._since = 0

    def due(self, request_id: str, late: Mapping[int, LateLabel]) -> int | None:
        """Return which endpoint to test with a request, as its key in `late`; None: no endpoint.

        For a repeated pick of the same request, the result is the same, and the request counts only
        once. Of several endpoints that are due, the one that has waited for the most requests is
        returned.
        """
        slot = self._decided.get(request_id)
        if slot is not None:
            return next((key for key, (load, _) in late.items() if load.slot == slot), None)
        self._since += 1
        due, most = None, PASSED - 1
        for key, (load, lateness) in late.items():
            belief, count, total = self._passed.get(load.slot, (load.belief, 0, 0.0))
            if belief is not load.belief:
                belief, count, total = load.belief, 0, 0.0
            is_usual = lateness * count <= ROUNDED * total
            if self._since > PASSED and count > most and is_usual:
                due, most = key, count
            self._passed[load.slot] = belief, count + 1, total + lateness
        self._decided[request_id] = -1
        if due is not None:
            self._decided[request_id] = tested = late[due][0].slot
            self._since = 0
            self.forget(tested)
        if len(self._decided) > PASSED:
            del self._decided[next(iter(self._decided))]
        return due

    def forget(self, slot: int) -> None:
        """Start to count again for the endpoint in `slot`, because it has got a request."""
        self._passed.pop(slot, None)
