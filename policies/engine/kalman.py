"""A Kalman filter that learns the correction factors of predicted step times.

One observed time (first_token_calibration.py) can depend on several factors. The factors multiply
the predictions of step_time.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from operator import mul

MOST_CORRECTION = 4.0  # largest |ln| of a correction: 1/55 to 55 times the prior
NOISE_VAR = 0.02**2  # noise that is added to the known variance of every observation
DRIFT_VAR = 0.003**2  # drift of the common factor between two observations
PART_DRIFT_VAR = 0.002**2  # drift of a partial factor, for example after an engine update


class KalmanFilter:
    """A Kalman filter on the logarithms of several correction factors, with their covariance.

    The first factor applies to all work, and each other factor to one part of it. If an engine
    becomes slower, it does so in all its work, so only the first factor changes. The factor of a
    part is learned from observations in which that part is large or small.

    A single outlier has little weight. Two outliers in the same direction mean that the GPU was
    throttled or released, so the variance grows and the filter follows.

    factors  correction factors, 1.0 at first
    covar    covariance of their logarithms
    var      variance of the logarithm of the last observed ratio, after that observation; before
             the first observation, the initial variance
    """

    __slots__ = ("_last", "_logs", "_most_vars", "covar", "factors", "var")

    def __init__(self, *prior_vars: float) -> None:
        places = range(len(prior_vars))
        self.covar = [
            [prior_vars[row] if row == column else 0.0 for column in places] for row in places
        ]
        self.factors = [1.0 for _ in places]
        self._logs = [0.0 for _ in places]
        self._most_vars, self.var = prior_vars, prior_vars[0]
        self._last = 0.0

    def restore(
        self, logs: Sequence[float], covar: Sequence[Sequence[float]], var: float, last: float
    ) -> None:
        """Set the filter to the state of an earlier one, for example after a restart.

        logs   logarithms of the correction factors
        covar  covariance of these logarithms
        var    the attribute `var`
        last   logarithm of the last observed ratio, limited to -1 to 1
        """
        self._logs, self.factors = list(logs), [exp(log_) for log_ in logs]
        self.covar, self.var, self._last = [list(row) for row in covar], var, last

    def observe(self, ratio: float, shares: Sequence[float], noise_var: float) -> None:
        """Update the correction factors: an observed time was `ratio` times its prediction.

        shares     fraction of that time to which each factor applies; 1 for the first factor
        noise_var  variance of the ratio's logarithm
        """
        covar, logs = self.covar, self._logs
        surprise = max(-1.0, min(1.0, log(ratio))) if ratio > 0 else -1.0
        opened = DRIFT_VAR + max(0.0, 0.2 * surprise * self._last)
        self._last = surprise
        # The variance stays below that of the prior, so that an unobserved factor does not drift.
        for index, most_var in enumerate(self._most_vars):
            covar[index][index] += max(0.0, min(opened, most_var - covar[index][index]))
            opened = PART_DRIFT_VAR
        gains = [sum(map(mul, row, shares)) for row in covar]
        believed, noise = max(0.0, sum(map(mul, gains, shares))), noise_var + NOISE_VAR
        var = believed + noise
        most = 3.0 * sqrt(var)
        surprise = max(-most, min(most, surprise)) / var
        for row, gain in enumerate(gains):
            corrected = logs[row] + gain * surprise
            if not -MOST_CORRECTION < corrected < MOST_CORRECTION:
                corrected = MOST_CORRECTION if corrected > 0 else -MOST_CORRECTION
            logs[row], self.factors[row] = corrected, exp(corrected)
            weight = gain / var
            covar[row] = [
                value - weight * other for value, other in zip(covar[row], gains, strict=True)
            ]
        self.var = believed * noise / var
