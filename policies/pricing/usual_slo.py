"""Finds the latency budgets that most requests of a pool have.

A large pool is kept sorted by the price of a usual request. With other budgets than those of most
requests, the best endpoints of the order would not be the best ones for them.
"""

from __future__ import annotations

from policies.routing_types import Slo

MOST_VOTES = 64
"""Maximum lead of the usual budgets, in requests. After as many other requests it is lost."""


class UsualSlo:
    """The latency budgets of most requests: a majority vote (Boyer and Moore 1991) with a bounded
    lead.
    """

    __slots__ = ("_lead", "slo")

    def __init__(self, slo: Slo) -> None:
        self.slo, self._lead = slo, 0

    def vote(self, slo: Slo) -> bool:
        """Count a request's budgets; return whether they replace the usual ones now."""
        if slo is self.slo or slo == self.slo:
            if self._lead < MOST_VOTES:
                self._lead += 1
            return False
        if self._lead:
            self._lead -= 1
            return False
        self.slo, self._lead = slo, 1
        return True
