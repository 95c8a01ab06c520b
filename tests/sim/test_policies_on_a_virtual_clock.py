"""Tests of routing policies with four simulated engines: cache hits, latency and load balance."""

from __future__ import annotations

import pytest

from planner.replay import (
    FleetSpec,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    RequestEnd,
    replay,
    traffic,
)
from planner.replay.results import ReplayFigures, figures
from planner.traces import TraceRequest
from policies import policy_registry
from tests.sim.conversation import conversation, shared_cache_hit_ratio

GROUP = GroupKind("llama-3.1-70b-fp8", "h200", 4, count=4)
FOUR = FleetSpec("four", (GROUP,))
ALL_KV_TOKENS = GROUP.count * GROUP.capacity_tokens
HOUSE = ("round_robin", "least_loaded", "prefix_aware")


def ran(policy: str, requests: list[TraceRequest]) -> ReplayRun:
    return replay(
        FOUR, traffic(requests), policy_registry.build(policy, {}), options=ReplayOptions()
    )


@pytest.fixture(scope="module")
def told() -> dict[str, ReplayFigures]:
    return {name: figures(ran(name, conversation())) for name in HOUSE}


def ttft_s(one: ReplayFigures) -> float:
    assert one.ttft is not None
    return one.ttft.mean


@pytest.mark.parametrize("policy", policy_registry.names())
def test_every_request_is_served_by_every_policy(policy: str) -> None:
    run = ran(policy, conversation(200))
    assert {record.end for record in run.records} == {RequestEnd.SERVED}
    assert sum(group.output_tokens for group in run.groups) == sum(
        record.output_tokens for record in run.records
    )


def test_prefix_aware_comes_within_a_tenth_of_one_cache_with_all_the_memory(
    told: dict[str, ReplayFigures],
) -> None:
    ideal = shared_cache_hit_ratio(conversation(), ALL_KV_TOKENS)
    assert told["prefix_aware"].hit_ratio >= 0.9 * ideal
    assert told["least_loaded"].hit_ratio < 0.6 * ideal


def test_prefix_aware_has_the_least_mean_time_to_first_token(
    told: dict[str, ReplayFigures],
) -> None:
    mine = ttft_s(told["prefix_aware"])
    assert mine < 0.95 * ttft_s(told["least_loaded"])
    assert mine < 0.95 * ttft_s(told["round_robin"])


def test_the_longest_wait_with_prefix_aware_is_that_of_least_loaded_at_most(
    told: dict[str, ReplayFigures],
) -> None:
    mine, other = told["prefix_aware"].ttft, told["least_loaded"].ttft
    assert mine is not None
    assert other is not None
    assert mine.max <= 1.1 * other.max


def test_the_index_of_prefix_aware_matches_the_caches_of_the_engines(
    told: dict[str, ReplayFigures],
) -> None:
    assert told["prefix_aware"].believed_ratio == pytest.approx(
        told["prefix_aware"].hit_ratio, rel=0.05
    )


def test_least_loaded_keeps_groups_even_on_the_trace(told: dict[str, ReplayFigures]) -> None:
    assert told["least_loaded"].imbalance <= 1.15


@pytest.mark.parametrize("prefix_tokens", [2048, 16_384])
def test_one_hot_prefix_spills_over_all_groups(prefix_tokens: int) -> None:
    # All prompts share a prefix, and one engine could not serve the load.
    #
    # Every engine ends up with a copy and a fair share. With a single prefix there is no choice, so
    # least_loaded is the reference, with one computation per engine.
    blocks = prefix_tokens // 512
    requests = [
        TraceRequest(number * 0.02, prefix_tokens + 300, 200, (*range(blocks), 10_000 + number))
        for number in range(1200)
    ]
    mine, bar = figures(ran("prefix_aware", requests)), figures(ran("least_loaded", requests))
    assert mine.imbalance <= 1.15
    assert mine.hit_ratio > 0.8
    assert ttft_s(mine) < ttft_s(bar) * 1.25
    assert mine.ttft is not None
    assert mine.ttft.max < 5.0


def test_many_prefixes_spread_evenly_over_the_groups() -> None:
    requests = [
        TraceRequest(
            number * 0.1,
            6144 + 600,
            200,
            (*range(100 * (number % 150), 100 * (number % 150) + 12), 10**6 + number),
        )
        for number in range(1500)
    ]
    mine = figures(ran("prefix_aware", requests))
    assert mine.hit_ratio >= 0.9 * shared_cache_hit_ratio(requests, ALL_KV_TOKENS)
    assert mine.imbalance <= 1.15
