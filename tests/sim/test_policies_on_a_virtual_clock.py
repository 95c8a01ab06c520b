"""The three policies in front of four simulated TP groups: hits, first tokens, balance."""

from __future__ import annotations

import pytest

from mockgpu.grids import roofline_for
from mockgpu.hardware import gpu_named
from mockgpu.llm import kv_capacity_tokens, model_named
from policies import registry
from tests.sim.fleet import Arrival, Fleet, Kind, Report, mooncake, shared_cache_hit_ratio

GROUPS = 4
MODEL, GPU, TP = model_named("llama-3.1-70b-fp8"), gpu_named("h200"), 4
KV_TOKENS = kv_capacity_tokens(MODEL, GPU, TP)


def replay(policy: str, arrivals: list[Arrival]) -> Report:
    return Fleet(registry.build(policy, {}), [Kind(roofline_for(MODEL, GPU, TP), KV_TOKENS)] * GROUPS).run(arrivals)


@pytest.fixture(scope="module")
def conversation() -> list[Arrival]:
    return mooncake()


@pytest.fixture(scope="module")
def reports(conversation: list[Arrival]) -> dict[str, Report]:
    return {name: replay(name, conversation) for name in registry.names()}


def test_every_request_of_the_trace_is_served_by_every_policy(reports: dict[str, Report]) -> None:
    for report in reports.values():
        assert len(report.served) == 1500
        assert min(one.ttft_s for one in report.served) > 0
        assert all(group.load.in_flight == 0 and group.load.prefill_tokens == 0 for group in report.groups)


def test_prefix_aware_comes_within_a_tenth_of_one_cache_with_all_the_memory(
    reports: dict[str, Report], conversation: list[Arrival]
) -> None:
    ideal = shared_cache_hit_ratio(conversation, GROUPS * KV_TOKENS)
    assert reports["prefix_aware"].hit_ratio >= 0.9 * ideal
    assert reports["least_loaded"].hit_ratio < 0.6 * ideal


def test_prefix_aware_has_the_least_mean_time_to_first_token(reports: dict[str, Report]) -> None:
    mine = reports["prefix_aware"].mean_ttft_s
    assert mine < 0.95 * reports["least_loaded"].mean_ttft_s
    assert mine < 0.95 * reports["round_robin"].mean_ttft_s


def test_prefix_aware_leaves_nobody_waiting_longer_than_least_loaded_would(reports: dict[str, Report]) -> None:
    assert reports["prefix_aware"].worst_ttft_s <= 1.1 * reports["least_loaded"].worst_ttft_s


def test_what_prefix_aware_believes_is_what_the_engines_hold(reports: dict[str, Report]) -> None:
    served = reports["prefix_aware"].served
    believed, held = sum(one.believed_tokens for one in served), sum(one.job.cached for one in served)
    assert believed == pytest.approx(held, rel=0.05)


def test_least_loaded_keeps_groups_even_on_the_trace(reports: dict[str, Report]) -> None:
    assert reports["least_loaded"].imbalance <= 1.3


@pytest.mark.parametrize("prefix_tokens", [2048, 16_384])
def test_one_hot_prefix_spills_over_all_groups(prefix_tokens: int) -> None:
    """A prompt shared by all, at a rate one group could not serve: everybody ends up with a copy and a fair share.

    When all prompts begin alike there is nothing to choose: least_loaded is the bar, paid once for finding that out.
    """
    blocks = prefix_tokens // 512
    arrivals = [
        Arrival(number * 0.02, prefix_tokens + 300, 200, [*range(blocks), 10_000 + number]) for number in range(2000)
    ]
    report = replay("prefix_aware", arrivals)
    assert report.imbalance <= 1.3
    assert report.hit_ratio > 0.8
    assert report.mean_ttft_s < replay("least_loaded", arrivals).mean_ttft_s * 1.25
    assert report.worst_ttft_s < 5.0


def test_many_prefixes_find_homes_without_piling_up() -> None:
    """150 customers with 6,000-token prompts, asked in turn: hits near all that is possible, groups even."""
    arrivals = [
        Arrival(
            number * 0.1, 6144 + 600, 200, [*range(100 * (number % 150), 100 * (number % 150) + 12), 10**6 + number]
        )
        for number in range(1500)
    ]
    report = replay("prefix_aware", arrivals)
    assert report.hit_ratio >= 0.9 * shared_cache_hit_ratio(arrivals, GROUPS * KV_TOKENS)
    assert report.imbalance <= 1.3
