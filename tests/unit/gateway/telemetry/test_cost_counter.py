"""Tests of the live cost of requests by model, class and tenant. Idle time is counted
separately.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gateway.metrics.catalogue import Metrics
from gateway.telemetry.cost_counter import LiveCost
from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Endpoint, Request
from policies.sizing.parallel_layout import Layout

ENDPOINT = Endpoint("g", "http://g", "main", "m", layout=Layout(4), labels={"gpu": "h100"})
PRICES = {"h100": 2.5}


def live(endpoint: Endpoint = ENDPOINT) -> SimpleNamespace:
    return SimpleNamespace(endpoint=endpoint, load=EndpointLoad(0))


def request(tenant: str, prompt: int = 1000) -> Request:
    return Request("id", "m", tenant, prompt, 100)


def swept(
    engine: SimpleNamespace, prices: dict[str, float], has_tenants: bool = True
) -> tuple[dict[tuple[str, ...], float], float]:
    metrics = Metrics()
    cost = LiveCost(metrics, 0.0)
    for step in range(1, 3601):
        cost.sweep([engine], prices, has_tenants, float(step))
    usd = {key: counter.value for key, counter in metrics.cost_usd_total.children()}
    idle = sum(counter.value for _, counter in metrics.idle_cost_usd_total.children())
    return usd, idle


def test_an_hour_of_an_idle_group_is_its_price() -> None:
    assert swept(live(), PRICES) == ({}, pytest.approx(10.0))


def test_tenants_pay_for_their_requests_and_the_sum_is_the_price() -> None:
    engine = live()
    load_ledger.reserve(engine.load, request("a"), 0, 0.0)
    entries = [load_ledger.reserve(engine.load, request("b"), 0, 0.0) for _ in range(4)]
    for entry in entries:
        entry.on_first_token(0.0)
    usd, idle = swept(engine, PRICES)
    # One prompt with weight 1 costs as much as four answers, which share their steps.
    by_tenant = {key[2]: value for key, value in usd.items()}
    assert by_tenant == {"a": pytest.approx(5.0), "b": pytest.approx(5.0)}
    assert idle == 0.0
    assert {key[0] for key in usd} == {"m"}


def test_without_the_tenant_label_all_tenants_are_one() -> None:
    engine = live()
    for tenant in "ab":
        load_ledger.reserve(engine.load, request(tenant), 0, 0.0)
    usd, _ = swept(engine, PRICES, has_tenants=False)
    assert {key[2]: value for key, value in usd.items()} == {"": pytest.approx(10.0)}


@pytest.mark.parametrize("prices", [{}, {"h200": 3.0}])
def test_without_a_price_nothing_is_counted(prices: dict[str, float]) -> None:
    engine = live()
    load_ledger.reserve(engine.load, request("a"), 0, 0.0)
    assert swept(engine, prices) == ({}, 0.0)
