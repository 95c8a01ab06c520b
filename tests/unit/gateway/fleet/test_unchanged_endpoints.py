"""Tests that a reload of the configuration costs nothing for endpoints that stay as they are."""

from __future__ import annotations

from math import inf

import pytest

from gateway.config import Config, config_from_engines
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from tests.replacement import replace_method
from tests.unit.gateway.fleet.tables import table_of

URLS = [f"http://127.0.0.1:{port}" for port in range(9000, 9008)]


def count_changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # Return a list to which every later change of an endpoint adds its URL.
    changes: list[str] = []
    reconfigure, attach = LiveEndpoint.reconfigure, EndpointTable._attach_gauges

    def counting_reconfigure(live: LiveEndpoint, *settings: object) -> None:
        changes.append(live.endpoint.url)
        reconfigure(live, *settings)  # type: ignore[arg-type]

    def counting_attach(table: EndpointTable, live: LiveEndpoint) -> None:
        changes.append(live.endpoint.url)
        attach(table, live)

    replace_method(monkeypatch, LiveEndpoint, "reconfigure", counting_reconfigure)
    replace_method(monkeypatch, EndpointTable, "_attach_gauges", counting_attach)
    return changes


def config_of(urls: list[str], stall_s: float | None = None) -> Config:
    config = config_from_engines(urls, "round_robin", "127.0.0.1", 0, 0).config
    if stall_s is None:
        return config
    timeouts = config.timeouts.model_copy(update={"stall": stall_s})
    return config.model_copy(update={"timeouts": timeouts})


async def test_an_equal_configuration_changes_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _, _ = table_of(URLS)
    changes = count_changes(monkeypatch)
    table.apply(table.plan(config_of(URLS)))
    assert not changes


async def test_only_changed_endpoints_get_their_settings_and_gauges_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, _, _ = table_of(URLS)
    config = config_of(URLS)
    ((name, pool),) = config.pools.items()
    changed = pool.endpoints[3].model_copy(update={"name": "other", "max_concurrency": 7})
    endpoints = [*pool.endpoints[:3], changed, *pool.endpoints[4:]]
    pools = {name: pool.model_copy(update={"endpoints": endpoints})}
    config = config.model_copy(update={"pools": pools})
    changes = count_changes(monkeypatch)
    table.apply(table.plan(config))
    assert changes == [changed.url, changed.url]
    assert table.all()[3].endpoint.name == "other"
    assert table.all()[3].endpoint.max_concurrency == 7


async def test_new_timeouts_apply_to_all_endpoints() -> None:
    table, _, _ = table_of(URLS)
    table.apply(table.plan(config_of(URLS, stall_s=1.5)))
    assert {live.upstream.timeouts.stall_s for live in table.all()} == {1.5}


async def test_a_changed_label_states_the_slots_of_an_endpoint_that_stays() -> None:
    table, _, _ = table_of(URLS)
    config = config_of(URLS)
    ((name, pool),) = config.pools.items()
    changed = pool.endpoints[3].model_copy(update={"labels": {"max_num_seqs": "48"}})
    endpoints = [*pool.endpoints[:3], changed, *pool.endpoints[4:]]
    pools = {name: pool.model_copy(update={"endpoints": endpoints})}
    table.apply(table.plan(config.model_copy(update={"pools": pools})))
    assert [live.load.slots for live in table.all()] == [*3 * [inf], 48, *4 * [inf]]


async def test_a_new_endpoint_shares_the_answer_lengths_that_its_pool_has_learned() -> None:
    table, _, _ = table_of(URLS[:2])
    before = table.all()[0].load.timeline.lengths
    table.apply(table.plan(config_of(URLS[:3])))
    assert len(table.all()) == 3
    assert all(live.load.timeline.lengths is before for live in table.all())
