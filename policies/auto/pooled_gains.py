"""Averages the gain of each routing policy over several comparisons of policies.

One comparison of a few minutes often has an error as large as the gain. Each request is counted in
only one comparison, so comparisons are independent samples. They are divided into blocks of
consecutive requests, which can be pooled. Old blocks count less, because traffic changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt

import msgspec

from policies.auto.replay_messages import MemberEstimate, PoolEstimate

HALF_LIFE_S = 1800.0
"""Seconds after which a comparison has half of its weight."""

MOST_COMPARISONS = 12
"""Maximum number of pooled comparisons."""

LIMIT, EXCESS = 1.96, 2.8
"""Quantile of Student's t distribution for a 95 % interval with n values: about
LIMIT + EXCESS / (n - 1)."""


class Comparison(msgspec.Struct, frozen=True):
    """The result of one simulated comparison of routing policies on recent requests.

    at_s      when it was made, in seconds on the clock of the code that decides
    requests  number of replayed requests
    members   for each policy, how much more goodput it would have had than the current one
    """

    at_s: float
    requests: int
    members: tuple[MemberEstimate, ...]


class PooledGains:
    """Collects what several comparisons of routing policies found, to average over them.

    One comparison of a few minutes of traffic is too noisy. Comparisons from before the last change
    of the current policy do not count.

    until_s  Unix time before which all compared requests arrived; 0: no comparisons yet
    """

    def __init__(self) -> None:
        self._incumbent = ""
        self._comparisons: deque[Comparison] = deque(maxlen=MOST_COMPARISONS)
        self.until_s = 0.0

    def add(self, now: float, estimate: PoolEstimate) -> None:
        """Record a comparison.

        If the current policy has changed, earlier comparisons are discarded.
        """
        if estimate.incumbent != self._incumbent:
            self.forget()
            self._incumbent = estimate.incumbent
        self._comparisons.append(Comparison(now, estimate.requests, estimate.members))
        self.until_s = estimate.until_s

    def forget(self) -> None:
        self._comparisons.clear()
        self.until_s = 0.0

    @property
    def comparisons(self) -> int:
        """The number of stored comparisons over which `pooled` averages."""
        return len(self._comparisons)

    @property
    def requests(self) -> int:
        """Return how many requests all pooled comparisons replayed together."""
        return sum(comparison.requests for comparison in self._comparisons)

    def pooled(self, now: float) -> list[MemberEstimate]:
        """Return the average gain of each other policy over all stored comparisons, with its error.

        Old comparisons count less. Policies that the last comparison does not have are left out.
        The field `gains` of each result is empty.
        """
        if not self._comparisons:
            return []
        return [
            self._pool(now, member)
            for member in self._comparisons[-1].members
            if member.member != self._incumbent and member.gains
        ]

    def _pool(self, now: float, latest: MemberEstimate) -> MemberEstimate:
        weights: list[float] = []
        gains: list[float] = []
        for comparison in self._comparisons:
            for member in comparison.members:
                if member.member == latest.member and member.gains:
                    age_s = now - comparison.at_s
                    weight = comparison.requests / len(member.gains) * 0.5 ** (age_s / HALF_LIFE_S)
                    weights += [weight] * len(member.gains)
                    gains += member.gains
        gain = _mean(weights, gains)
        return MemberEstimate(latest.member, latest.goodput, gain, _error(weights, gains, gain))


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _error(weights: Sequence[float], values: Sequence[float], mean: float) -> float:
    # Return half of the width of the 95 % interval of a weighted mean of independent values.
    count = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    if count <= 1:
        return 1.0
    squares = _mean(weights, [(value - mean) ** 2 for value in values])
    return (LIMIT + EXCESS / (count - 1)) * sqrt(squares / (count - 1))
