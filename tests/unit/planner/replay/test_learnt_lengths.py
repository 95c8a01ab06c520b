"""Tests of what a simulated gateway expects: lengths of answers, and speeds of labelled engines.

It learns lengths from answers. A wrong label changes what it expects of an engine, but not the
engine.
"""

from __future__ import annotations

import msgspec
import pytest

from mockgpu.scheduler import Job
from planner.replay import FleetError, FleetSpec, GroupKind, ReplayOptions, Traffic, replay
from planner.replay.fleet_spec import validate
from planner.replay.group_sim import build_engines
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry
from policies.engine.output_length import DEFAULT_OUTPUT_TOKENS
from policies.routing_types import Candidate, RoutingQuery


def expected_lengths(options: ReplayOptions) -> list[int]:
    policy = policy_registry.build("least_loaded", {})
    seen: list[int] = []

    def note(query: RoutingQuery, candidates: list[Candidate]) -> list[Candidate]:
        seen.append(query.request.output_tokens)
        return candidates

    policy = msgspec.structs.replace(policy, filters=(note, *policy.filters))
    arrivals = [TraceRequest(10.0 * number, 100, 40) for number in range(40)]
    replay(FleetSpec("one", (GroupKind(),)), Traffic(arrivals), policy, None, options)
    return seen


def test_the_gateway_expects_the_default_first_and_then_what_answers_taught() -> None:
    lengths = expected_lengths(ReplayOptions(learns_lengths=True))
    assert lengths[0] == DEFAULT_OUTPUT_TOKENS
    assert lengths[-1] == 40


def test_without_learning_each_request_is_expected_to_have_the_given_length() -> None:
    assert set(expected_lengths(ReplayOptions(expected_output=77))) == {77}


def test_a_label_changes_the_belief_and_not_the_engine() -> None:
    true = GroupKind(max_num_batched_tokens=4096)
    wrong = GroupKind(
        max_num_batched_tokens=4096, labelled_gpu="l40s", labelled_batched_tokens=2048
    )
    groups = [
        build_engines(FleetSpec("one", (kind,)), None, merges_steps=True, has_caps=False)[0][0]  # type: ignore[arg-type]
        for kind in (true, wrong)
    ]
    believed = [group.load.belief.shape for group in groups]
    assert believed[0].budget_tokens == 4096
    assert believed[1].budget_tokens == 2048
    assert believed[1].token_s > 2 * believed[0].token_s
    assert groups[1].engine.scheduler_of(Job(1, 1)).max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    "kind", [GroupKind(labelled_gpu="abacus"), GroupKind(labelled_batched_tokens=0)]
)
def test_an_unknown_label_is_an_error_of_the_fleet(kind: GroupKind) -> None:
    with pytest.raises(FleetError, match=r"abacus|labelled_batched_tokens"):
        validate(FleetSpec("one", (kind,)))
