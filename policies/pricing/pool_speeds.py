"""The learned speeds of the endpoints that a price compares, and whether they suffice for prices.

Labels and defaults may name another GPU, model or step size than an endpoint has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from policies.engine.step_time import UsualSpeeds
from policies.pricing.speed_differences import (
    UNOBSERVED,
    equalize_speeds,
    was_ever_observed,
    was_measured,
)
from policies.routing_types import Candidate

LONGEST_WAIT_S = 10.0
"""Seconds for which prices wait for the other one, after prefill or decoding has been observed."""

SpeedFactors = tuple[list[float], list[float], list[float]]
"""Correction factors for prefill, for its attention, and for decode steps; each a list in the order
of the candidates."""

# Every request reads these of all candidates: one call in C, in place of a loop.
_SPEEDS = attrgetter("load.belief.speeds")


class _Comparison:
    # What the speeds of one list of candidates say.
    #
    # learned         the speeds, in the candidates' order
    # factors         the factors on estimated times that follow from them
    # has_unobserved  whether the prefill of a candidate was never observed
    # is_unmeasured   whether prefill and decoding were observed at too few candidates
    # is_unknown      whether even one of the two was observed at too few

    __slots__ = ("factors", "has_unobserved", "is_unknown", "is_unmeasured", "learned")

    def __init__(self, learned: list[UsualSpeeds], equal_factor: float, share: float) -> None:
        prefill, pairs, step = zip(*learned, strict=True) if learned else ((), (), ())
        self.learned = learned
        self.factors: SpeedFactors = (
            equalize_speeds(prefill, equal_factor),
            equalize_speeds(pairs, equal_factor),
            equalize_speeds(step, equal_factor),
        )
        self.has_unobserved = any(speeds.prefill == UNOBSERVED for speeds in learned)
        least = share * len(learned)
        self.is_unmeasured = sum(map(was_measured, learned)) < least
        self.is_unknown = sum(map(was_ever_observed, learned)) < least


class PoolSpeeds:
    """The learned speeds of candidates, made equal where they differ by noise.

    The last two results are kept, because they change only when a speed is observed, and a split
    compares prefill endpoints and decode endpoints in turn.

    equal_factor    see PricedPolicy.equal_speed_factor
    measured_share  see PricedPolicy.measured_share
    """

    __slots__ = ("_equal_factor", "_known_since", "_measured_share", "_now", "_other")

    def __init__(self, equal_factor: float, measured_share: float) -> None:
        self._equal_factor, self._measured_share = equal_factor, measured_share
        self._now = self._other = _Comparison([], equal_factor, measured_share)
        self._known_since = inf

    def factors(self, candidates: Sequence[Candidate]) -> SpeedFactors:
        """Return the factors on estimated times of these candidates.

        The properties and `can_decide` refer to the candidates of the last call.
        """
        learned = list(map(_SPEEDS, candidates))
        if learned != self._now.learned:
            self._now, self._other = self._other, self._now
            if learned != self._now.learned:
                self._now = _Comparison(learned, self._equal_factor, self._measured_share)
        return self._now.factors

    @property
    def has_unobserved(self) -> bool:
        """Return whether the prefill of a candidate was never observed."""
        return self._now.has_unobserved

    def can_decide(self, now: float) -> bool:
        """Return whether enough speeds were observed for prices.

        Long answers show decoding late, and short prompts prefill never: one of the two is enough
        after LONGEST_WAIT_S.
        """
        if not self._now.is_unmeasured:
            return True
        if self._now.is_unknown:
            self._known_since = inf
            return False
        self._known_since = min(self._known_since, now)
        return now >= self._known_since + LONGEST_WAIT_S
