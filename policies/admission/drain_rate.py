"""The measured rate at which requests or work are completed, as an exponentially decaying mean."""

from __future__ import annotations

from math import exp, expm1


class DrainRate:
    """The measured rate at which a pool completes work: requests, or seconds of work, per second.

    It is an exponentially decaying mean with a time constant of `tau_s` seconds. The rate is None
    (unknown) before the second completion, and again after a long silence. The object is not
    thread-safe.
    """

    __slots__ = ("_began", "_last", "_presence", "_tau_s", "_weight")

    def __init__(self, tau_s: float = 10.0) -> None:
        if tau_s <= 0:
            raise ValueError(f"the time constant tau_s must be positive, not {tau_s}")
        self._tau_s = tau_s
        self._began: float | None = None
        self._last = self._weight = self._presence = 0.0

    def record(self, now: float, amount: float = 1.0) -> None:
        """Record that `amount` of work was completed at the time `now`.

        `now` is in seconds, on a clock that never goes back.
        """
        if self._began is None:
            self._began = now
        else:
            decay = exp((self._last - now) / self._tau_s)
            self._weight = self._weight * decay + amount
            self._presence = self._presence * decay + 1.0
        self._last = now

    def per_s(self, now: float) -> float | None:
        """Return the amount of work completed per second around `now`, or None if unknown.

        The rate is correct from the first seconds on, because both the work and the measured time
        decay. The first completion only starts the measurement.
        """
        if self._began is None:
            return None
        span = self._tau_s * -expm1((self._began - now) / self._tau_s)
        decay = exp((self._last - now) / self._tau_s)
        return self._weight * decay / span if span > 0 and self._presence * decay > 0.05 else None

    def seconds_for(self, amount: float, now: float) -> float | None:
        """Return how many seconds `amount` of work takes at the measured rate.

        None means that the rate is unknown.
        """
        rate = self.per_s(now)
        return amount / rate if rate else None
