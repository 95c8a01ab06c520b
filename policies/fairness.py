"""Weighted token fairness: a virtual counter per tenant, charged with the work it gets. Whose counter is least is next.

Start-time fair queueing (Goyal et al. 1996) in tokens, as VTC (Sheng et al., OSDI 2024) and DLPM charge them: prompt
tokens that are computed, not those found cached, and output tokens. Not here: who waits, and in which order within a
tenant (waiting.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

import msgspec

from policies.bounds import Number, Positive
from policies.model import Request

FORGIVEN = 1e-3
"""A debt below so many tokens is none: the tenant need not be remembered."""

FADE_EVERY_S = 1.0


class FairShares(msgspec.Struct, frozen=True):
    """Who may get how much of a contended pool.

    weights     share of a tenant in relation to others; 1 for those not named
    calm_s      time constant by which use is forgiven while nobody has to wait: it took nothing from anybody
    remembered  tenants with a debt remembered at most
    """

    weights: Mapping[str, Positive] = {}
    calm_s: Positive = 10.0
    remembered: Number = 4096


class Counters:
    """The virtual counters, in tokens per unit of weight. One owner.

    floor  the counter of whoever was served last: the pool's virtual time, never going back. One who was away starts
           there, so that idleness saves nothing up; one who is ahead of it owes the difference.
    """

    __slots__ = ("_ahead", "_faded_at", "_shares", "floor")

    def __init__(self, shares: FairShares | None = None) -> None:
        self._shares = shares or FairShares()
        self._ahead: dict[str, float] = {}
        self._faded_at: float | None = None
        self.floor = 0.0

    def __len__(self) -> int:
        return len(self._ahead)

    def share(self, shares: FairShares) -> None:
        """From now on these weights; what was charged stays charged."""
        self._shares = shares

    def weight(self, tenant: str) -> float:
        return self._shares.weights.get(tenant, 1.0)

    def of(self, tenant: str) -> float:
        return max(self.floor, self._ahead.get(tenant, 0.0))

    def charge(self, tenant: str, tokens: float) -> float:
        """The tenant's counter after so many tokens of work; negative: so many were charged wrongly."""
        counter = max(self.floor, self.of(tenant) + tokens / self.weight(tenant))
        if counter <= self.floor + FORGIVEN:
            self._ahead.pop(tenant, None)
        else:
            self._ahead[tenant] = counter
            if len(self._ahead) > self._shares.remembered:
                self._prune()
        return counter

    def served(self, counter: float) -> None:
        """The turn has come of one who had this counter, the least of all who wait: virtual time moves there."""
        self.floor = max(self.floor, counter)

    def fade(self, now: float) -> None:
        """Nobody waits now: what was used fades with time. To be called now and then, and before somebody waits."""
        if self._faded_at is None:
            self._faded_at = now
        elif now - self._faded_at >= FADE_EVERY_S:
            kept, self._faded_at = exp((self._faded_at - now) / self._shares.calm_s), now
            debts = {tenant: (counter - self.floor) * kept for tenant, counter in self._ahead.items()}
            self._ahead = {tenant: self.floor + debt for tenant, debt in debts.items() if debt > FORGIVEN}

    def contended(self) -> None:
        """Somebody waits: from here on every token counts until `fade` is called again."""
        self._faded_at = None

    def _prune(self) -> None:
        """Forget who owes nothing any more; if that is not enough, the half that owes least."""
        self._ahead = {tenant: counter for tenant, counter in self._ahead.items() if counter > self.floor + FORGIVEN}
        if len(self._ahead) > self._shares.remembered:
            debtors = sorted(self._ahead.items(), key=lambda item: item[1], reverse=True)
            self._ahead = dict(debtors[: self._shares.remembered // 2])


def charged_tokens(request: Request, cached_tokens: int) -> int:
    """What serving the request costs its tenant: prompt tokens to compute and output tokens expected."""
    return max(0, request.prompt_tokens - cached_tokens) + request.output_tokens
