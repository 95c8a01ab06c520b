"""Tests of what the health checker polls: less from busy endpoints, and idle ones less often."""

from __future__ import annotations

import msgspec
import pytest

from gateway.config import Config
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.poll_schedule import QUIET_PROBES_PER_S, UNPROBED_POLLS, PollPlan
from policies.health.endpoint_health import HealthEvent
from policies.routing_types import EngineKind
from tests.unit.gateway.fleet.tables import table_of


@pytest.fixture
async def fleet() -> tuple[EndpointTable, LiveEndpoint, Config]:
    table, _, config = table_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    return table, table.all()[0], config


def asked(
    plan: PollPlan, live: LiveEndpoint, config: Config, seconds: int, endpoints: int = 2
) -> list[tuple[bool, bool]]:
    # Simulate one poll per second; return for each whether it has a probe and a scrape.
    asks = []
    for second in range(seconds):
        plan.begin(live, config, endpoints, 100.0 + second)
        asks.append((plan.needs_probe, plan.needs_scrape))
    return asks


async def test_an_idle_endpoint_is_probed_at_its_interval_and_scraped_less_often(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    _, live, config = fleet
    live.load.scraped_at = 100.0
    asks = asked(PollPlan(), live, config, 6)
    assert [probe for probe, _ in asks] == [True] * 6
    assert [scrape for _, scrape in asks] == [True, False, False, True, False, False]


async def test_a_busy_endpoint_is_scraped_at_every_interval(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    _, live, config = fleet
    live.load.scraped_at, live.load.in_flight = 100.0, 1
    assert all(scrape for _, scrape in asked(PollPlan(), live, config, 6))


async def test_answers_stand_for_probes_but_not_for_all(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    _, live, config = fleet
    plan, probes = PollPlan(), list[bool]()
    for second in range(2 + 2 * UNPROBED_POLLS):
        live.upstream.last_body_at = 99.5 + second
        plan.begin(live, config, 2, 100.0 + second)
        probes.append(plan.needs_probe)
    assert sum(probes) == 2
    assert probes.index(True, probes.index(True) + 1) - probes.index(True) - 1 == UNPROBED_POLLS


async def test_an_endpoint_that_has_failed_is_probed_whatever_it_answers(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    table, live, config = fleet
    table.on_event(live, HealthEvent.FAILED)
    plan = PollPlan()
    for second in range(4):
        live.upstream.last_body_at = 99.5 + second
        plan.begin(live, config, 4 * QUIET_PROBES_PER_S, 100.0 + second)
        assert plan.needs_probe


async def test_quiet_endpoints_of_a_large_fleet_share_a_rate_of_probes(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    _, live, config = fleet
    asks = asked(PollPlan(), live, config, 20, endpoints=4 * QUIET_PROBES_PER_S)
    assert sum(probe for probe, _ in asks) == 5
    live.load.in_flight = 1
    assert sum(probe for probe, _ in asked(PollPlan(), live, config, 20, endpoints=2000)) == 20


async def test_a_provider_is_probed_no_more_than_every_ten_seconds(
    fleet: tuple[EndpointTable, LiveEndpoint, Config],
) -> None:
    _, live, config = fleet
    live.endpoint = msgspec.structs.replace(live.endpoint, engine=EngineKind.OPENAI)
    asks = asked(PollPlan(), live, config, 21)
    assert [second for second, (probe, _) in enumerate(asks) if probe] == [0, 8, 16]
