"""CostFit: learns from measured durations how long one unit of each kind of work takes.

For example, a read of n blocks takes a fixed time plus a time for each block. The amounts of work
are then 1 read and n blocks. A duration is modelled as the sum of amount times cost over all kinds
of work. Costs are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

DECAY = 0.9
"""Factor by which the weight of earlier measurements falls with every new one.

About the last ten measurements decide the result.
"""

_LEAST_S = 1e-6
# Ridge parameter of the fit. If two amounts always grow together, it divides the cost between them.
_RIDGE = 1e-9


class CostFit:
    """Learns from measured durations how long one unit of each kind of work takes.

    For example, a read of 12 blocks is 1 unit of "read" and 12 units of "block".

    amounts  number of kinds of work that add up to a duration
    samples  number of measurements so far
    """

    def __init__(self, amounts: int) -> None:
        self.samples = 0
        self._amounts = amounts
        self._products = [[0.0] * amounts for _ in range(amounts)]
        self._moments = [0.0] * amounts
        self._rates: list[float] | None = None

    def add(self, amounts: Sequence[float], seconds: float, measured_s: float) -> None:
        """Learn from one measurement: these amounts of work took `seconds`.

        amounts     amount of each kind of work, such as (1, 12) for 1 read of 12 blocks
        measured_s  the measured duration, of which `seconds` is a part; errors are relative to it
        """
        weight = 1 / max(measured_s, _LEAST_S) ** 2
        for i, amount in enumerate(amounts):
            row = self._products[i]
            for j, other in enumerate(amounts):
                row[j] = row[j] * DECAY + weight * amount * other
            self._moments[i] = self._moments[i] * DECAY + weight * amount * seconds
        self.samples += 1
        self._rates = None

    def rates(self) -> Sequence[float]:
        """Return the seconds per unit of each kind of work; 0 for a kind without measurements."""
        if self._rates is None:
            self._rates = self._fit()
        return self._rates

    def _fit(self) -> list[float]:
        # Fit every subset of the amounts: the best fit without negative rates is one of these fits.
        scales = [self._products[i][i] ** 0.5 for i in range(self._amounts)]
        used = [i for i, scale in enumerate(scales) if scale]
        best, best_gain = [0.0] * self._amounts, 0.0
        for size in range(1, len(used) + 1):
            for subset in combinations(used, size):
                rates = self._solve(subset, scales)
                if min(rates) < 0:
                    continue
                gain = self._gain(subset, rates)
                if gain > best_gain:
                    best_gain = gain
                    best = [0.0] * self._amounts
                    for i, rate in zip(subset, rates, strict=True):
                        best[i] = rate
        return best

    def _gain(self, subset: Sequence[int], rates: Sequence[float]) -> float:
        # Return by how much these rates reduce the sum of squared errors.
        explained = sum(self._moments[i] * rate for i, rate in zip(subset, rates, strict=True))
        squares = sum(
            self._products[i][j] * a * b
            for i, a in zip(subset, rates, strict=True)
            for j, b in zip(subset, rates, strict=True)
        )
        return 2 * explained - squares

    def _solve(self, subset: Sequence[int], scales: Sequence[float]) -> list[float]:
        # Solve the normal equations of some amounts, scaled so that the diagonal is 1.
        rows = [
            [self._products[i][j] / (scales[i] * scales[j]) + _RIDGE * (i == j) for j in subset]
            + [self._moments[i] / scales[i]]
            for i in subset
        ]
        return [value / scales[i] for i, value in zip(subset, _eliminate(rows), strict=True)]


def _eliminate(rows: list[list[float]]) -> list[float]:
    # Solve linear equations, each a row of factors with the right side at its end. The factors
    # are a positive definite matrix, so no rows have to be exchanged.
    size = len(rows)
    for pivot, upper in enumerate(rows):
        for lower in rows[pivot + 1 :]:
            factor = lower[pivot] / upper[pivot]
            for column in range(pivot, size + 1):
                lower[column] -= factor * upper[column]
    solved = [0.0] * size
    for index in reversed(range(size)):
        row = rows[index]
        known = sum(row[j] * solved[j] for j in range(index + 1, size))
        solved[index] = (row[size] - known) / row[index]
    return solved
