"""Weighted fairness between tenants: the tenant with the lowest counter of used tokens is next.

Used tokens are uncached prompt tokens plus output tokens, as in VTC (Sheng et al., OSDI 2024) and
DLPM. The counters follow start-time fair queueing (Goyal et al. 1996). The main class is
TenantCounters. The queue that uses it is in wait_queue.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

import msgspec

from policies.param_types import Positive, PositiveCount
from policies.routing_types import Request

FORGIVEN = 1e-3
"""A tenant with fewer tokens of past usage than this counts as having used nothing.

Its counter can then be dropped.
"""

FADE_EVERY_S = 1.0


class FairShares(msgspec.Struct, frozen=True):
    """The parameters by which tenants share a full pool.

    weights     relative weight by tenant; 1 for tenants that are not listed
    calm_s      time constant in seconds with which past usage decays while no request waits
    remembered  maximum number of tenants whose usage is stored
    """

    weights: Mapping[str, Positive] = {}
    calm_s: Positive = 10.0
    remembered: PositiveCount = 4096


class TenantCounters:
    """Counts the usage of all tenants, in tokens per unit of the tenant's weight.

    The tenant with the lowest counter is served next. A tenant that returns after a pause does not
    start at its old, low counter, because it would then displace all others. It starts at `floor`.

    floor  the counter of the tenant served last, which never decreases (the virtual time of fair
           queueing). What a tenant's counter has above `floor` is its debt
    """

    __slots__ = ("_ahead", "_faded_at", "_shares", "floor")

    def __init__(self, shares: FairShares | None = None) -> None:
        self._shares = shares or FairShares()
        self._ahead: dict[str, float] = {}
        self._faded_at: float | None = None
        self.floor = 0.0

    def __len__(self) -> int:
        return len(self._ahead)

    def set_shares(self, shares: FairShares) -> None:
        """Replace the tenants' weights and parameters.

        The usage recorded so far is kept.
        """
        self._shares = shares

    def weight(self, tenant: str) -> float:
        return self._shares.weights.get(tenant, 1.0)

    def counter_of(self, tenant: str) -> float:
        return max(self.floor, self._ahead.get(tenant, 0.0))

    def charge(self, tenant: str, tokens: float) -> float:
        """Add `tokens` tokens of work to the tenant's usage, and return its new counter.

        A negative number is a refund.
        """
        counter = max(self.floor, self.counter_of(tenant) + tokens / self.weight(tenant))
        if counter <= self.floor + FORGIVEN:
            self._ahead.pop(tenant, None)
        else:
            self._ahead[tenant] = counter
            if len(self._ahead) > self._shares.remembered:
                self._prune()
        return counter

    def advance_to(self, counter: float) -> None:
        """Record that a tenant whose counter is `counter` is served now.

        `counter` is the lowest of all tenants with waiting requests. The pool's virtual time,
        `floor`, rises to that counter, and tenants without past usage start there.
        """
        self.floor = max(self.floor, counter)

    def forgive(self, now: float) -> None:
        """Let past usage of all tenants decay by the time since the last call.

        Usage above `floor` (a tenant's debt) makes a tenant's requests wait for other tenants'.
        While no request waits, usage delays no other tenant, so it decays within a few times calm_s
        seconds. Call this regularly while nothing waits, and before a request starts to wait.
        """
        if self._faded_at is None:
            self._faded_at = now
        elif now - self._faded_at >= FADE_EVERY_S:
            decay, self._faded_at = exp((self._faded_at - now) / self._shares.calm_s), now
            debts = {
                tenant: (counter - self.floor) * decay for tenant, counter in self._ahead.items()
            }
            self._ahead = {
                tenant: self.floor + debt for tenant, debt in debts.items() if debt > FORGIVEN
            }

    def stop_forgiving(self) -> None:
        """Stop the decay of past usage, because a request waits.

        The next `forgive` starts it again.
        """
        self._faded_at = None

    def _prune(self) -> None:
        # Drop tenants without a debt.
        #
        # If too many remain, keep only those with the highest debts.
        self._ahead = {
            tenant: counter
            for tenant, counter in self._ahead.items()
            if counter > self.floor + FORGIVEN
        }
        if len(self._ahead) > self._shares.remembered:
            debtors = sorted(self._ahead.items(), key=lambda item: item[1], reverse=True)
            self._ahead = dict(debtors[: self._shares.remembered // 2])


def billable_tokens(request: Request, cached_tokens: int) -> int:
    """Return the cost of a request to its tenant: uncached prompt tokens plus expected output
    tokens.

    cached_tokens  prompt tokens that the picked endpoint is believed to have cached
    """
    return max(0, request.prompt_tokens - cached_tokens) + request.output_tokens
