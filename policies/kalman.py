"""Correction factors learnt together, from observations that are of several of them at once.

Lives here: the filter. Not here: what is observed (lessons.py), and what the factors multiply (latency.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from operator import mul

MOST_CORRECTION = 4.0  # |ln| of a correction: from 1/55 to 55 times the prior
NOISE_VAR = 0.02**2  # of one observation beyond what is known of it
DRIFT_VAR = 0.003**2  # by which a truth may move between two observations


class Kalman:
    """A Kalman filter on the logarithms of some factors, with what their errors have in common.

    The first factor is on everything; the others are on parts, besides it. So an engine that has become slower is so in
    all it does, while what is odd about a part is told from it by observations in which that part is large or small.
    One observation far off is mistrusted; two in a row in the same direction are a GPU that was throttled, or set free,
    and the filter opens up to follow.

    factors  what to multiply the prior with; covar  variances and covariances of their logarithms
    """

    __slots__ = ("_last", "_logs", "_most_var", "covar", "factors")

    def __init__(self, *prior_vars: float) -> None:
        places = range(len(prior_vars))
        self.covar = [[prior_vars[row] if row == column else 0.0 for column in places] for row in places]
        self.factors = [1.0 for _ in places]
        self._logs = [0.0 for _ in places]
        self._most_var = prior_vars[0]
        self._last = 0.0

    def observe(self, ratio: float, shares: Sequence[float], noise_var: float) -> None:
        """Something took `ratio` times as long as was believed, each factor being on `shares` of it (the first on 1);
        noise_var is the variance of the ratio's logarithm."""
        covar, logs = self.covar, self._logs
        surprise = max(-1.0, min(1.0, log(ratio))) if ratio > 0 else -1.0
        opened = DRIFT_VAR + max(0.0, 0.2 * surprise * self._last)
        self._last = surprise
        covar[0][0] += max(0.0, min(opened, self._most_var - covar[0][0]))
        gains = [sum(map(mul, row, shares)) for row in covar]
        var = sum(map(mul, gains, shares)) + noise_var + NOISE_VAR
        most = 3.0 * sqrt(var)
        surprise = max(-most, min(most, surprise)) / var
        for row, gain in enumerate(gains):
            learnt = max(-MOST_CORRECTION, min(MOST_CORRECTION, logs[row] + gain * surprise))
            logs[row], self.factors[row] = learnt, exp(learnt)
            covar[row] = [each - gain * other / var for each, other in zip(covar[row], gains, strict=True)]

    def var(self, shares: Sequence[float]) -> float:
        """The variance of the logarithm of what the factors are on by these shares."""
        found = sum(share * sum(map(mul, row, shares)) for share, row in zip(shares, self.covar, strict=True))
        return max(0.0, float(found))
