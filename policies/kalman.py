"""Correction factors learnt together, from observations that are of several of them at once.

Lives here: the filter. Not here: what is observed (lessons.py), and what the factors multiply (latency.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from operator import mul

MOST_CORRECTION = 4.0  # |ln| of a correction: from 1/55 to 55 times the prior
NOISE_VAR = 0.02**2  # of one observation beyond what is known of it
DRIFT_VAR = 0.003**2  # by which the truth of everything may move between two observations
PART_DRIFT_VAR = 0.002**2  # and that of a part: an engine that is brought up to date, or another kernel


class Kalman:
    """A Kalman filter on the logarithms of some factors, with what their errors have in common.

    The first factor is on everything; the others are on parts, besides it. So an engine that has become slower is so in
    all it does, while what is odd about a part is told from it by observations in which that part is large or small.
    One observation far off is mistrusted; two in a row in the same direction are a GPU that was throttled, or set free,
    and the filter opens up to follow.

    factors  what to multiply the prior with; covar  variances and covariances of their logarithms
    var      of the logarithm of what was observed last, as it is known since; the prior's before anything was
    """

    __slots__ = ("_last", "_logs", "_most_vars", "covar", "factors", "var")

    def __init__(self, *prior_vars: float) -> None:
        places = range(len(prior_vars))
        self.covar = [[prior_vars[row] if row == column else 0.0 for column in places] for row in places]
        self.factors = [1.0 for _ in places]
        self._logs = [0.0 for _ in places]
        self._most_vars, self.var = prior_vars, prior_vars[0]
        self._last = 0.0

    def restore(self, logs: Sequence[float], covar: Sequence[Sequence[float]], var: float, last: float) -> None:
        """Go on where another filter with the same prior stopped."""
        self._logs, self.factors = list(logs), [exp(each) for each in logs]
        self.covar, self.var, self._last = [list(row) for row in covar], var, last

    def observe(self, ratio: float, shares: Sequence[float], noise_var: float) -> None:
        """Something took `ratio` times as long as was believed, each factor being on `shares` of it (the first on 1);
        noise_var is the variance of the ratio's logarithm."""
        covar, logs = self.covar, self._logs
        surprise = max(-1.0, min(1.0, log(ratio))) if ratio > 0 else -1.0
        opened = DRIFT_VAR + max(0.0, 0.2 * surprise * self._last)
        self._last = surprise
        for place, most_var in enumerate(self._most_vars):  # up to the prior's: what nobody observes does not run away
            covar[place][place] += max(0.0, min(opened, most_var - covar[place][place]))
            opened = PART_DRIFT_VAR
        gains = [sum(map(mul, row, shares)) for row in covar]
        believed, noise = max(0.0, sum(map(mul, gains, shares))), noise_var + NOISE_VAR
        var = believed + noise
        most = 3.0 * sqrt(var)
        surprise = max(-most, min(most, surprise)) / var
        for row, gain in enumerate(gains):
            learnt = logs[row] + gain * surprise
            if not -MOST_CORRECTION < learnt < MOST_CORRECTION:
                learnt = MOST_CORRECTION if learnt > 0 else -MOST_CORRECTION
            logs[row], self.factors[row] = learnt, exp(learnt)
            told = gain / var
            covar[row] = [each - told * other for each, other in zip(covar[row], gains, strict=True)]
        self.var = believed * noise / var
