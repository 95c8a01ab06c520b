"""Who asks for more than its share of an overloaded pool: work offered per tenant, and the level up to which all fit.

Max-min fairness by weights: below the level a tenant pays no price, whatever others do. Not here: the order of those
who wait (fairness.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, sqrt

MOST_TENANTS = 1024
NEARLY = 0.9
"""The level is that of a little less than what is admitted: when a price rises somebody is there to pay it."""


class Usage:
    """Work offered and admitted, in seconds of a TP group, decaying with `tau_s`. One owner.

    level     decayed work per unit of weight up to which everything offered may be admitted
    _squares  the squares of the works offered, decayed twice as fast: the variance of their decayed sum, were they
              independent
    """

    __slots__ = ("_admitted", "_at", "_offered", "_squares", "_tau_s", "_weights", "level")

    def __init__(self, weights: Mapping[str, float], tau_s: float = 15.0) -> None:
        self._weights = weights
        self._tau_s = tau_s
        self._offered: dict[str, float] = {}
        self._admitted = self._squares = 0.0
        self._at: float | None = None
        self.level = inf

    def offered(self, tenant: str, work_s: float, admitted: bool) -> None:
        """A request of so much work came, and was let in or not. Counted once, when that is known."""
        if tenant not in self._offered and len(self._offered) >= MOST_TENANTS:
            del self._offered[min(self._offered, key=lambda name: self._offered[name])]
        self._offered[tenant] = self._offered.get(tenant, 0.0) + work_s
        self._squares += work_s * work_s
        if admitted:
            self._admitted += work_s

    def tick(self, now: float) -> None:
        """Let the past fade, and find the level that what is admitted now would reach if it were shared fairly."""
        fade = exp(min(0.0, self._at - now) / self._tau_s) if self._at is not None else 1.0
        self._at = now
        self._admitted *= fade
        self._squares *= fade * fade
        self._offered = {name: work * fade for name, work in self._offered.items() if work * fade > 1e-6}
        left, weight = NEARLY * self._admitted, sum(map(self.weight, self._offered))
        self.level = inf
        for name in sorted(self._offered, key=lambda name: self._offered[name] / self.weight(name)):
            level = left / max(weight, self.weight(name))  # the sum of what is left may have rounded to less, or to 0
            if self._offered[name] / self.weight(name) > level:
                self.level = level
                return
            left -= self._offered[name]
            weight -= self.weight(name)

    @property
    def shared(self) -> bool:
        """Whether several tenants have asked lately."""
        return len(self._offered) > 1

    def asked_s(self, waiting_s: float, doubt: float) -> float:
        """Work asked for lately, in seconds of a TP group per second, less `doubt` standard deviations of what so few
        requests of such sizes add up to by chance; `waiting_s` of it is not decided on yet."""
        return max(0.0, sum(self._offered.values()) + waiting_s - doubt * sqrt(self._squares)) / self._tau_s

    def excess(self, tenant: str) -> float:
        """0 for a tenant that asks for its share or less, 1 for one well beyond, and a slope between: how much of the
        price it pays. One who is alone has nobody to share with and pays all of it."""
        if len(self._offered) <= 1:
            return 1.0
        asked = self._offered.get(tenant, 0.0) / self.weight(tenant)
        return min(1.0, max(0.0, (asked / self.level - 1.0) / 0.2)) if self.level > 0 else 1.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
