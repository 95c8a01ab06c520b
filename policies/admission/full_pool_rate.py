"""Measures the rate at which a pool completes work while it is full.

At the beginning of an overload, the rate of the last seconds is too low, because the pool was not
full before. FullLoadRate measures only while the pool is full, and keeps the result for the next
overload. The schedule of retries (retry_after.py) uses it.
"""

from __future__ import annotations

from math import exp

GAP_S = 5.0
"""An overload counts as over when the pool was not full for this many seconds."""

SETTLED_S = 20.0
"""Seconds of overload before its completion rate is learned.

Earlier, the measured rate still includes requests from before the overload.
"""

MEMORY_S = 30.0
"""Time constant of the learned rate, in seconds of overload.

The rate is a running mean: after this time, an old measurement counts only 37 % as much as a new
one.
"""


class FullLoadRate:
    """The rate at which a pool completes work while it is full, remembered from past overloads.

    At the beginning of the next overload, this rate is known at once. It is per unit of capacity,
    such as one endpoint or one permit; the caller chooses the unit. So the rate stays valid when
    endpoints are added or removed.

    per_unit  work per second of one unit; None: the pool has not been full for `SETTLED_S` seconds
              yet
    """

    __slots__ = ("_last", "_since", "per_unit")

    def __init__(self) -> None:
        self.per_unit: float | None = None
        self._since: float | None = None
        self._last = 0.0

    def learn(self, now: float, measured: float | None) -> None:
        """Record a measured rate of a full pool. Call it often, but only while the pool is full.

        now       seconds on a clock that never goes back
        measured  work per second and unit over the last seconds; None: nothing was measured
        """
        if self._since is None or now - self._last > GAP_S:
            self._since = self._last = now
        elapsed_s, self._last = now - self._last, now
        if not measured or now - self._since < SETTLED_S:
            return
        if self.per_unit is None:
            self.per_unit = measured
        else:
            self.per_unit += (1.0 - exp(-elapsed_s / MEMORY_S)) * (measured - self.per_unit)
