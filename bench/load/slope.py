"""How fast something grows, told from samples that come and go: a robust line, and how sure it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

BIN_S = 10.0
"""Samples so close together are one point, the least of them: what requests in flight hold goes again, a leak stays."""

BLOCK = 6
"""Points so many in a row are drawn together: neighbours are alike, so that they say less than as many others would."""

DRAWS = 1000
Point = tuple[float, float]
Values = npt.NDArray[np.float64]


class Slope(msgspec.Struct, frozen=True):
    """Growth a second, and where 95 of 100 slopes lie that are found in the same noise drawn anew: that holds the truth
    nine times in ten where the noise is independent, and seven where it wanders for a minute."""

    per_s: float
    low: float
    high: float


def slope(samples: Sequence[Point]) -> Slope:
    """Of (seconds, value), in order: the median of the slopes between all pairs of points (Theil and Sen), which some
    outliers, or one step early or late, do not move; its range by drawing blocks of residuals anew (moving block
    bootstrap, always the same draws). ValueError for fewer than two points."""
    at, values = np.array(lows(samples)).T
    if len(at) < 2:
        raise ValueError(f"a slope needs {BIN_S * 2:.0f} s of samples")
    (per_s,) = _theil_sen(at, values[None])
    line = per_s * at
    line += np.median(values - line)
    low, high = np.quantile(_theil_sen(at, line + _redrawn(values - line)), (0.025, 0.975))
    return Slope(float(per_s), float(low), float(high))


def lows(samples: Sequence[Point]) -> list[Point]:
    """The least sample of every BIN_S."""
    bins: dict[int, Point] = {}
    for at, value in samples:
        number = int((at - samples[0][0]) // BIN_S)
        if number not in bins or value < bins[number][1]:
            bins[number] = at, value
    return list(bins.values())


def _theil_sen(at: Values, rows: Values) -> Values:
    """The slope of each row of values."""
    early, late = np.triu_indices(len(at), 1)
    slopes: Values = np.median((rows[:, late] - rows[:, early]) / (at[late] - at[early]), axis=1)
    return slopes


def _redrawn(values: Values) -> Values:
    """DRAWS rows of as many values, each of runs of neighbours from anywhere; a run that is cut off begins anew."""
    count = len(values)
    starts = np.random.default_rng(0).integers(count, size=(DRAWS, -(-count // BLOCK), 1))
    places = (starts + np.arange(BLOCK)) % count
    return values[places.reshape(DRAWS, -1)[:, :count]]
