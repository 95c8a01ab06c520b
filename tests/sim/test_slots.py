"""Tests of simulated engines that run as many requests at once as they can (their slots)."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from planner.replay import FleetSpec, GroupKind, ReplayOptions, Traffic
from planner.replay.fleet_sim import Fleet
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry

GROUP = GroupKind(kv_tokens=600_000, max_num_seqs=32, count=2)
SMALL = GroupKind("llama-3.1-8b", "a100", 1, max_num_seqs=64, count=2)


def run(policy: str) -> tuple[Fleet, float]:
    # Simulate long answers that fill all slots; return the share of TTFTs within 5 s.
    rng, at_s, arrivals = Random(3), 0.0, []
    for _ in range(400):
        at_s += rng.expovariate(1.0 / 0.31)
        arrivals.append(TraceRequest(at_s, rng.randint(100, 900), rng.randint(300, 2500)))
    options = ReplayOptions(seed=1, learns_lengths=True)
    fleet = Fleet(
        FleetSpec("slots", (GROUP,)),
        Traffic(arrivals),
        policy_registry.build(policy, {}),
        None,
        options,
    )
    records = fleet.run().records[80:]
    return fleet, sum((record.ttft_s or 1e9) <= 5.0 for record in records) / len(records)


@pytest.fixture(scope="module")
def priced() -> tuple[Fleet, float]:
    return run("priced")


def test_the_slots_are_learnt_and_waiting_for_one_does_not_spoil_the_learnt_speed(
    priced: tuple[Fleet, float],
) -> None:
    for group in priced[0].groups:
        assert group.load.slots == 32
        assert 0.6 <= group.load.belief.speeds.step.factor <= 1.5
        assert 0.6 <= group.load.belief.speeds.prefill.factor <= 1.8


def test_priced_keeps_as_many_first_tokens_as_rules_that_count_requests(
    priced: tuple[Fleet, float],
) -> None:
    assert priced[1] >= max(run("least_loaded")[1], run("llmd_blend")[1]) - 0.02


def run_load(kind: GroupKind, rate: float, answer: int, count: int) -> Fleet:
    # Simulate short prompts with answers of `answer` tokens, at `rate` requests per second.
    rng, at_s, arrivals = Random(5), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        arrivals.append(TraceRequest(at_s, rng.randint(40, 160), rng.randint(answer // 2, answer)))
    options = ReplayOptions(seed=1, learns_lengths=True)
    policy = policy_registry.build("priced", {})
    fleet = Fleet(FleetSpec("slots", (kind,)), Traffic(arrivals), policy, None, options)
    fleet.run()
    return fleet


def test_short_answers_show_the_slots_although_prompts_are_always_in_a_step() -> None:
    fleet = run_load(SMALL, 110.0, 120, 900)
    assert {group.load.slots for group in fleet.groups} == {64}


def test_the_gateway_knows_slots_that_a_label_states() -> None:
    stated = msgspec.structs.replace(SMALL, labelled_num_seqs=64)
    fleet = run_load(stated, 1.0, 50, 1)
    assert {group.load.slots for group in fleet.groups} == {64}
