"""Tests that an engine which returns gets neither too many nor too few requests.

The requests are half a minute of recorded conversations.
"""

from __future__ import annotations

import pytest

from planner.replay import FleetSpec, GroupKind, ReplayOptions, replay, traffic
from planner.replay.replay_options import GroupFault
from planner.replay.results import ReplayRun
from planner.traces import scale_rate, slice_span
from policies import policy_registry
from policies.admission_registry import build_admission
from tests.sim.conversation import conversation

LOST_S, BACK_S, RAMP_S, GROUPS = 30.0, 40.0, 10.0, 8


def run(policy: str, slow_start_s: float) -> ReplayRun:
    requests = slice_span(scale_rate(conversation(), 2.0), 0.0, 100.0)
    kind = GroupKind(
        "llama-3.1-70b-fp8", "h100", 4, kv_tokens=600_000, count=GROUPS, max_concurrency=24
    )
    faults = (GroupFault(LOST_S, 0, duration_s=BACK_S - LOST_S),)
    options = ReplayOptions(slow_start_s=slow_start_s, faults=faults)
    door = build_admission("cap", {})
    return replay(
        FleetSpec("one", (kind,)),
        traffic(requests),
        policy_registry.build(policy, {}),
        door,
        options,
    )


def taken(run: ReplayRun, from_s: float, to_s: float) -> float:
    then = [
        record
        for record in run.records
        if record.entered_s is not None and from_s <= record.entered_s < to_s
    ]
    return sum(record.group == "tp0" for record in then) / len(then)


def test_a_group_that_comes_back_is_not_flooded_while_others_have_room() -> None:
    # A policy that only looks at load would send everything to the empty engine.
    at_once, slowly = run("least_loaded", 0.0), run("least_loaded", RAMP_S)
    assert taken(at_once, BACK_S, BACK_S + RAMP_S) > 2 / GROUPS
    assert taken(slowly, BACK_S, BACK_S + RAMP_S) < 0.85 * taken(at_once, BACK_S, BACK_S + RAMP_S)
    good = [sum(record.is_good for record in run.records) for run in (at_once, slowly)]
    assert good[1] > 0.98 * good[0]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_a_group_that_comes_back_is_not_starved(policy: str) -> None:
    result = run(policy, RAMP_S)
    assert taken(result, BACK_S, BACK_S + 5) > 0
    assert 0.33 / GROUPS < taken(result, BACK_S + RAMP_S, BACK_S + 60) < 2 / GROUPS
