"""Divides the dollars of running engines between the requests in them and idle time, by weights.

An engine's GPUs cost the same every second. The dollars of a moment go to the requests in the
engine, in proportion to their weights (token_cost.py). If there are none, they go to idle time. So
the parts always add up to price x GPUs x time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from policies.sizing.token_cost import usd_of

Key = TypeVar("Key", bound=Hashable)


class EngineUse(msgspec.Struct, Generic[Key], frozen=True):
    """The use of one engine at one moment.

    price_hour  dollars per GPU and hour
    gpus        number of GPUs of the engine
    weights     total weight (token_cost.decode_weight) of this gateway's requests at the engine, by
                key. The caller chooses the keys, such as the tenant
    others      total weight of the requests of other gateways
    gateways    number of gateways that use the engine, including this one
    """

    price_hour: float
    gpus: int
    weights: Mapping[Key, float]
    others: float = 0.0
    gateways: int = 1


def divide_usd(use: EngineUse[Key], seconds: float) -> tuple[dict[Key, float], float]:
    """Divide the cost of an engine, and return (dollars by key, dollars of idle time).

    use      the engine's use
    seconds  the time for which the cost is divided

    Other gateways count the cost of their own requests, so it is not in the result. Each gateway
    counts an equal part of idle time.
    """
    usd = usd_of(use.price_hour, use.gpus, seconds)
    own = sum(use.weights.values())
    total = own + use.others
    if total <= 0:
        return {}, usd / use.gateways
    return {key: usd * weight / total for key, weight in use.weights.items()}, 0.0


class CostMeter(Generic[Key]):
    """Counts what each key, such as a tenant, costs in dollars, and what idle engines cost by pool.

    Call `advance` often: the requests that are in an engine at that moment pay for the time since
    the last call. So the costs of short requests are right only on average.
    """

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self.usd: dict[Key, float] = {}
        self.idle_usd: dict[str, float] = {}

    def advance(self, now_s: float, uses: Iterable[tuple[str, EngineUse[Key]]]) -> None:
        """Charge the time since the last call to the requests that are in the engines now.

        uses  (name of the engine's pool, its use) for each engine
        """
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if elapsed_s <= 0:
            return
        for pool, use in uses:
            shares, idle = divide_usd(use, elapsed_s)
            for key, usd in shares.items():
                self.usd[key] = self.usd.get(key, 0.0) + usd
            self.idle_usd[pool] = self.idle_usd.get(pool, 0.0) + idle
