"""Tests of data-parallel ranks of one engine that are configured as endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import Config
from gateway.fleet.endpoint_from_config import to_endpoint
from gateway.fleet.endpoint_registry import EndpointRegistry
from gateway.fleet.engine_metrics import parse_scrape
from gateway.fleet.kv_events.zmq_addresses import SourceAddress, SourceError, of_rank
from gateway.http.write_queue import WriteQueue
from policies.endpoint_load import EndpointLoad
from policies.engine.step_time import SpeedBelief
from policies.health.endpoint_health import Health, HealthState
from policies.routing_types import EngineKind
from tests.replacement import stand_in

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3
vllm:num_requests_running{model_name="m",engine="1"} 5
vllm:num_requests_running{model_name="m",engine="10"} 7
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="10"} 1
vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="20"} 1
"""


def config(**endpoint: Any) -> Config:
    spec = {"url": "http://engine:8000", "layout": {"dp": 2}, "pin_ranks": True} | endpoint
    return Config.model_validate({"version": 1, "pools": {"main": {"endpoints": [spec]}}})


def _registry() -> EndpointRegistry:
    return EndpointRegistry(stand_in(WriteQueue, None))


def test_each_pinned_rank_is_an_endpoint_with_a_name_and_a_key_of_its_own() -> None:
    plan = _registry().plan(config(name="one"))
    endpoints = [member.endpoint for member in plan.members]
    assert [endpoint.name for endpoint in endpoints] == ["one/dp0", "one/dp1"]
    assert len({endpoint.key for endpoint in endpoints}) == 2
    assert len({member.live.load.slot for member in plan.members}) == 2


def test_requests_to_a_rank_carry_its_number() -> None:
    plan = _registry().plan(config())
    for rank, member in enumerate(plan.members):
        member.live.reconfigure(member.endpoint, member.spec, plan.timeouts, None)
        head = member.live.upstream.request_head("/v1/completions")
        assert b"\r\nx-data-parallel-rank: %d\r\n" % rank in head


def test_ranks_that_move_to_another_pool_adopt_each_what_is_known_of_it() -> None:
    registry = _registry()
    registry.apply(registry.plan(config()))
    first, second = registry.all()
    first.is_drained, second.health = True, Health(HealthState.DEAD, 1.0)
    pools = {"other": config(layout={"dp": 3}).pools["main"]}
    moved = [
        member.live
        for member in registry.plan(config().model_copy(update={"pools": pools})).members
    ]
    assert [live.is_drained for live in moved] == [True, False, False]
    states = [live.health.state for live in moved]
    assert states == [HealthState.UP, HealthState.DEAD, HealthState.EJECTED]


def test_without_pinning_the_engine_is_one_endpoint_and_gets_no_rank() -> None:
    plan = _registry().plan(config(pin_ranks=False))
    (member,) = plan.members
    assert member.endpoint.key == ("main", "http://engine:8000")
    assert b"data-parallel" not in member.live.upstream.request_head("/v1/completions")


def test_the_load_of_a_rank_is_read_by_its_label() -> None:
    assert parse_scrape(METRICS, EngineKind.VLLM).running == 15
    load = parse_scrape(METRICS, EngineKind.VLLM, 1)
    assert (load.running, load.kv_tokens) == (5, 320)


def test_a_rank_has_the_source_of_its_own_events() -> None:
    addresses = [SourceAddress(f"tcp://engine:{port}", "", "") for port in (1, 2)]
    assert of_rank(addresses, None) == addresses
    assert of_rank(addresses, 1) == addresses[1:]
    with pytest.raises(SourceError, match="2 ranks"):
        of_rank(addresses, 2)


@pytest.mark.parametrize(
    "endpoint", [{"layout": {"dp": 1}}, {"engine": "trtllm"}, {"role": "prefill"}]
)
def test_ranks_that_cannot_be_pinned_are_refused(endpoint: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pin_ranks"):
        config(**endpoint)


def test_an_endpoint_with_a_rank_keeps_the_url_of_its_engine() -> None:
    spec = config().pools["main"].endpoints[0]
    endpoint = to_endpoint("main", spec, 1)
    assert (endpoint.url, endpoint.rank) == ("http://engine:8000", 1)


FULL = (0.0, 0.0, 0.0, 0.0, 1.0)
"""Seconds of a prefill of full steps, as SpeedBelief.observe_prefill reads them."""


def loads(registry: EndpointRegistry, **endpoint: Any) -> list[EndpointLoad]:
    # Return the loads of the ranks after this configuration was applied.
    plan = registry.plan(config(**endpoint))
    registry.apply(plan)
    return [member.live.load for member in plan.members]


def test_ranks_that_share_experts_are_known_to_step_together_and_share_a_speed() -> None:
    first, second = loads(_registry(), layout={"dp": 2, "ep": 2})
    assert first.lockstep_ranks == (first, second)
    assert second.lockstep_ranks is first.lockstep_ranks
    assert first.belief is second.belief


def test_ranks_with_experts_of_their_own_step_apart_also_after_a_reload() -> None:
    registry = _registry()
    first, second = loads(registry)
    assert first.lockstep_ranks == second.lockstep_ranks == ()
    assert first.belief is not second.belief
    assert loads(registry, layout={"dp": 2, "ep": 2})[0].lockstep_ranks == (first, second)
    assert loads(registry)[0].lockstep_ranks == ()


def test_ranks_that_step_apart_after_a_reload_keep_their_common_speed_and_learn_apart() -> None:
    registry = _registry()
    first, second = loads(registry, layout={"dp": 2, "ep": 2})
    first.belief.observe_prefill(2.0, FULL, 0.0, 0.01)
    learned = first.belief.speeds
    assert learned != SpeedBelief().speeds
    assert loads(registry) == [first, second]
    assert first.belief.speeds == second.belief.speeds == learned
    first.belief.observe_prefill(4.0, FULL, 0.0, 0.01)
    assert first.belief.speeds != second.belief.speeds == learned
    unchanged = first.belief
    assert loads(registry)[0].belief is unchanged
