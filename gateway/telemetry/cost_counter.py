"""Updates the dollar metrics of requests and idle engines, from the live reservations at engines.

The count is updated a few times per second, not per request. policies/sizing/cost_meter.py divides
an engine's cost between its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from gateway.metrics.catalogue import Metrics
from policies.load_ledger import LoadReservation
from policies.sizing.cost_meter import CostMeter, EngineUse
from policies.sizing.token_cost import decode_weight

if TYPE_CHECKING:
    from policies.endpoint_load import EndpointLoad
    from policies.routing_types import Endpoint

# Tokens that the KV cache is assumed to hold while its size is unknown.
UNKNOWN_KV_TOKENS = 1 << 20
CostKey = tuple[str, str, str]
"""The key of a cost: model, service class and tenant."""


class CostedEndpoint(Protocol):
    """The interface of an endpoint whose cost is counted: its configuration and its load."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def load(self) -> EndpointLoad: ...


class LiveCost:
    """Counts the cost of requests and of idle engines in dollars, in two metrics.

    There is one object per process.
    """

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._meter: CostMeter[CostKey] = CostMeter(now_s)

    def sweep(
        self,
        endpoints: Iterable[CostedEndpoint],
        prices: Mapping[str, float],
        has_tenants: bool,
        now_s: float,
    ) -> None:
        """Add the cost of the time since the last call to the cost metrics.

        prices       dollars per GPU and hour, by the endpoints' label `gpu`; an endpoint without a
                     price costs nothing
        has_tenants  whether the cost metric has a label for the tenant
        now_s        time of the call in seconds
        """
        meter = self._meter
        meter.advance(now_s, _uses(endpoints, prices, has_tenants) if prices else ())
        for key, usd in meter.usd.items():
            self._metrics.cost_usd_total.labels(*key).value += usd
        for pool, usd in meter.idle_usd.items():
            self._metrics.idle_cost_usd_total.labels(pool).value += usd
        meter.usd.clear()
        meter.idle_usd.clear()


def _uses(
    endpoints: Iterable[CostedEndpoint], prices: Mapping[str, float], has_tenants: bool
) -> Iterator[tuple[str, EngineUse[CostKey]]]:
    for live in endpoints:
        price = prices.get(live.endpoint.labels.get("gpu", ""))
        if price is None:
            continue
        load, others = live.load, live.load.peer_load
        weights: dict[CostKey, float] = {}
        batch, kv_tokens = load.decoding, load.kv_tokens or UNKNOWN_KV_TOKENS
        for reservation in load.reservations:
            if not isinstance(reservation, LoadReservation):
                continue
            request = reservation.request
            key = request.model, request.slo.name, request.tenant if has_tenants else ""
            weight = 1.0
            if reservation.is_decoding:
                weight = decode_weight(batch, request.prompt_tokens, kv_tokens)
            weights[key] = weights.get(key, 0.0) + weight
        waiting = others.in_flight - others.decoding
        yield (
            live.endpoint.pool,
            EngineUse(
                price,
                live.endpoint.layout.gpus,
                weights,
                waiting + others.decoding / max(1, batch),
                1 + len(others.shares),
            ),
        )
