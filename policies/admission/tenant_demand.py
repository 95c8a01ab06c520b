"""Detects tenants that request more than their fair share of an overloaded pool.

TenantDemand computes weighted max-min fair shares. A tenant below its share pays no price for
admission, whatever other tenants request. The order of waiting requests is in fairness.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, sqrt

MOST_TENANTS = 1024
NEARLY = 0.9
"""Part of the admitted work (0 to 1) that fair shares divide among the tenants.

If they divided all of it, they could just suffice for every tenant. A rising price would then
affect no tenant.
"""


class TenantDemand:
    """Measures how much work each tenant requests, and how much of it is admitted.

    Work is in seconds of one engine (TP group). Past work counts less the older it is.

    level     the fair share: seconds of work per unit of tenant weight. A tenant that requests more
              pays a price for admission. inf: no tenant pays
    _squares  sum of the squared work of recent requests, to estimate the variance of their sum
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
        """Record one request of a tenant. Call this exactly once per request, also if it is
        refused.

        work_s    seconds of work of the request
        admitted  whether it was admitted
        """
        if tenant not in self._offered and len(self._offered) >= MOST_TENANTS:
            del self._offered[min(self._offered, key=lambda name: self._offered[name])]
        self._offered[tenant] = self._offered.get(tenant, 0.0) + work_s
        self._squares += work_s * work_s
        if admitted:
            self._admitted += work_s

    def tick(self, now: float) -> None:
        """Reduce the past work of all tenants by its age at `now`, and compute the fair share
        `level`.
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
        return len(self._offered) > 1

    @property
    def admitted_per_s(self) -> float:
        """Return the work of all tenants that was recently admitted, in engine seconds per
        second.
        """
        return self._admitted / self._tau_s

    def demand(self, waiting_s: float, doubt: float) -> float:
        """Return the work that was recently requested, in engine seconds per second.

        A margin for chance is subtracted, because a few large requests at once are not an overload.

        waiting_s  seconds of work of the waiting requests, which are added to the recent ones
        doubt      the margin, in standard deviations
        """
        return (
            max(0.0, sum(self._offered.values()) + waiting_s - doubt * sqrt(self._squares))
            / self._tau_s
        )

    def price_share(self, tenant: str) -> float:
        """Return the share of the full price that a tenant pays, 0 to 1.

        A tenant at or below its fair share of the pool pays nothing. Above it, the share rises
        linearly, to 1 at 1.2 times the fair share. If there is only one tenant, it pays the full
        price.
        """
        if len(self._offered) <= 1:
            return 1.0
        requested = self._offered.get(tenant, 0.0) / self.weight(tenant)
        return min(1.0, max(0.0, (requested / self.level - 1.0) / 0.2)) if self.level > 0 else 1.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
