"""Which tenants request more than their fair share of an overloaded pool.

Max-min fairness by weights: below the level a tenant pays no price, whatever others do. The order
of waiting requests is in policies/admission/fairness.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, sqrt

MOST_TENANTS = 1024
NEARLY = 0.9
"""The level is computed from slightly less than the admitted work, so that a rising price always
affects some tenant.
"""


class TenantUsage:
    """Requested and admitted work, in seconds of a TP group, decaying with `tau_s`. One owner.

    level     decayed work per unit of weight up to which all requested work may be admitted
    _squares  decayed sum of the squares of requested works: the variance of their sum, if
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

    def record(self, tenant: str, work_s: float, admitted: bool) -> None:
        """Record a request and whether it was admitted.

        Called once per request, when that is known.
        """
        if tenant not in self._offered and len(self._offered) >= MOST_TENANTS:
            del self._offered[min(self._offered, key=lambda name: self._offered[name])]
        self._offered[tenant] = self._offered.get(tenant, 0.0) + work_s
        self._squares += work_s * work_s
        if admitted:
            self._admitted += work_s

    def tick(self, now: float) -> None:
        """Let past usage decay, and compute the level at which the admitted work would be shared
        fairly.
        """
        fade = exp(min(0.0, self._at - now) / self._tau_s) if self._at is not None else 1.0
        self._at = now
        self._admitted *= fade
        self._squares *= fade * fade
        self._offered = {
            name: work * fade for name, work in self._offered.items() if work * fade > 1e-6
        }
        remaining, weight = NEARLY * self._admitted, sum(map(self.weight, self._offered))
        self.level = inf
        for name in sorted(self._offered, key=lambda name: self._offered[name] / self.weight(name)):
            # the remaining weight may have been rounded below this tenant's, or to 0
            level = remaining / max(weight, self.weight(name))
            if self._offered[name] / self.weight(name) > level:
                self.level = level
                return
            remaining -= self._offered[name]
            weight -= self.weight(name)

    @property
    def has_several_tenants(self) -> bool:
        """Whether several tenants have sent requests lately."""
        return len(self._offered) > 1

    @property
    def admitted_per_s(self) -> float:
        """Work that was admitted lately, in TP-group seconds per second."""
        return self._admitted / self._tau_s

    def demand(self, waiting_s: float, doubt: float) -> float:
        """Return the requested work lately, in TP-group seconds per second, minus `doubt` standard
        deviations.

        The deviation is what requests of these sizes add up to by chance; `waiting_s` of the work
        is not decided on yet.
        """
        return (
            max(0.0, sum(self._offered.values()) + waiting_s - doubt * sqrt(self._squares))
            / self._tau_s
        )

    def price_share(self, tenant: str) -> float:
        """Return which share of the price a tenant pays: 0 within its fair share, 1 well above it,
        linear in between.

        A tenant without competition pays all of it.
        """
        if len(self._offered) <= 1:
            return 1.0
        requested = self._offered.get(tenant, 0.0) / self.weight(tenant)
        return min(1.0, max(0.0, (requested / self.level - 1.0) / 0.2)) if self.level > 0 else 1.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
