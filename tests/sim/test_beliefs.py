"""Tests that predicted times to first token are close to those that a simulation then has.

The requests are recorded conversations.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean, median

from msgspec.structs import replace

from planner.replay import (
    FleetSpec,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    RequestEnd,
    replay,
    traffic,
)
from planner.replay.results import ReplayRecord
from planner.traces import scale_rate
from planner.traces.b2b import b2b
from policies import policy_registry
from tests.sim.conversation import conversation

H100 = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=4)
L40S = GroupKind("llama-3.1-70b-fp8", "l40s", 8, count=4)
REQUESTS, WARM_S = 800, 90.0


@cache
def ran(*kinds: GroupKind, speed: float) -> ReplayRun:
    requests = scale_rate(conversation(REQUESTS), speed)
    fleet = FleetSpec("fleet", kinds)
    return replay(
        fleet,
        traffic(requests),
        policy_registry.build("prefix_aware", {}),
        options=ReplayOptions(scrape_s=None),
    )


def errors(run: ReplayRun) -> list[float]:
    # Return the relative errors of predicted TTFTs after the warm-up.
    #
    # Only requests count whose number of cached tokens was predicted correctly.
    return [
        error(record)
        for record in run.records
        if record.arrived_s > WARM_S and record.end is RequestEnd.SERVED and known(record)
    ]


def known(record: ReplayRecord) -> bool:
    return abs(record.believed_tokens - record.cached_tokens) < 600


def error(record: ReplayRecord) -> float:
    assert record.first_s is not None
    assert record.entered_s is not None
    assert record.predicted_ttft_s is not None
    actual_s = record.first_s - record.entered_s
    return abs(record.predicted_ttft_s - actual_s) / actual_s


def test_ttft_is_predicted_at_half_load() -> None:
    result = errors(ran(H100, speed=0.6))
    assert len(result) > 500
    assert median(result) < 0.04
    assert fmean(result) < 0.06


def test_ttft_is_predicted_near_saturation() -> None:
    result = errors(ran(H100, speed=1.0))
    assert median(result) < 0.045
    assert fmean(result) < 0.07


def test_ttft_is_predicted_for_unequal_gpus_as_well_as_for_equal_ones() -> None:
    result = errors(ran(H100, L40S, speed=1.0))
    assert median(result) < 0.045
    assert fmean(result) < 0.075


def test_a_group_slower_than_its_gpu_label_is_detected() -> None:
    result = errors(ran(replace(H100, count=3), replace(H100, count=1, slowness=3.0), speed=0.5))
    assert median(result) < 0.05


def test_a_shared_prefix_needs_kv_once_not_per_sequence() -> None:
    fleet = FleetSpec("two", (GroupKind("qwen3-32b", "h100", 2, count=2, kv_tokens=307_000),))
    run = replay(
        fleet, traffic(b2b(3.0, 100.0, 1, prompts=30)), policy_registry.build("prefix_aware", {})
    )
    matches = [
        error(record)
        for record in run.records
        if record.arrived_s > 20.0 and record.end is RequestEnd.SERVED
    ]
    assert len(matches) > 200
    assert fmean(matches) < 0.1


def bias(run: ReplayRun) -> float:
    # Return by how much tokens after the first were expected to take longer than they did.
    #
    # It is a share of the actual time.
    answers = [
        (record.output_tokens, record.predicted_tpot_s or 0.0, record.tpot_s)
        for record in run.records
        if record.arrived_s > WARM_S
        and record.end is RequestEnd.SERVED
        and record.tpot_s is not None
    ]
    took_s = sum(tokens * actual_s for tokens, _, actual_s in answers)
    return sum(tokens * predicted_s for tokens, predicted_s, _ in answers) / took_s - 1.0


def test_mean_response_times_are_predicted_at_half_load_and_near_saturation() -> None:
    assert abs(bias(ran(H100, speed=0.6))) < 0.05
    assert abs(bias(ran(H100, speed=1.0))) < 0.06
