"""Tests of which prompts a modelled engine step contains, as their first tokens show."""

from __future__ import annotations

import pytest

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine.step_time import SpeedBelief, shape_for
from policies.latency.expected_latency import backlog_s
from policies.load_ledger import LoadReservation
from tests.unit.policies.builders import ask

SHAPE = shape_for("h100", 4, params_b=70.6, weight_bytes=1, request_s=0.0)
PART_S = 2000 * SHAPE.token_s + 2000 * SHAPE.wire_s


def queued(prompts: int) -> tuple[EndpointLoad, list[LoadReservation]]:
    # Return an engine that computes one prompt of 2,000 tokens while equal ones wait.
    load = EndpointLoad(0, SpeedBelief(SHAPE))
    first = load_ledger.reserve(load, ask(2000).request, 0, 0.0)
    others = [load_ledger.reserve(load, ask(2000).request, 0, 0.01) for _ in range(prompts)]
    first.on_first_token(load.next_first_token_at)
    return load, others


def test_prompts_without_a_first_token_in_a_step_wait_for_the_next_one() -> None:
    load, (one, two, three, four) = queued(4)
    load_ledger.reserve(load, ask(1).request, 0, 0.2)  # plans a step of all four
    assert len(load.timeline.completing) == 4
    at_s = 0.2 + 2.2 * PART_S
    for entry in (one, two):
        entry.on_first_token(at_s)
    load.timeline.advance(load, at_s + 0.05)
    load.timeline.refresh_forecast(load, at_s + 0.05)
    assert load.timeline.completing[:2] == [three, four]
    assert backlog_s(load, at_s + 0.05) > 1.5 * PART_S
    assert load.timeline.kv_prompts >= 4000
    for entry in (three, four):
        entry.on_first_token(at_s + 2.2 * PART_S)
    assert load.timeline.batch == 5


def test_prompts_whose_first_tokens_are_written_one_after_another_were_in_one_step() -> None:
    load, entries = queued(4)
    load_ledger.reserve(load, ask(1).request, 0, 0.2)  # plans a step of all four
    began_s = load.timeline.step_began_at
    at_s = began_s + SHAPE.step_s + 4 * PART_S
    for number, entry in enumerate(entries):
        entry.on_first_token(at_s + 0.01 * number)
        load_ledger.reserve(load, ask(1).request, 0, at_s + 0.01 * number + 0.005)
        assert not set(entries) & {*load.timeline.queue, *load.timeline.completing}
    load.timeline.advance(load, at_s + 0.1)
    assert load.belief.speeds.prefill.factor == pytest.approx(1.0, rel=0.1)


def test_prompts_that_were_not_in_a_step_do_not_make_the_engine_look_fast() -> None:
    load, entries = queued(4)
    load_ledger.reserve(load, ask(1).request, 0, 0.2)
    began_s = load.timeline.step_began_at
    entries[0].on_first_token(began_s + SHAPE.step_s + PART_S + 0.05)
    load.timeline.advance(load, began_s + 0.5)
    assert load.belief.speeds.prefill.factor > 0.9


def test_prompts_that_a_step_held_although_they_were_not_expected_in_it_count() -> None:
    load = EndpointLoad(0, SpeedBelief(SHAPE))
    entries = [load_ledger.reserve(load, ask(2000).request, 0, 0.001 * n) for n in range(3)]
    assert len(load.timeline.completing) == 1
    at_s = SHAPE.step_s + 3 * PART_S
    for entry in entries:
        entry.on_first_token(at_s)
    load_ledger.reserve(load, ask(2000).request, 0, at_s + 0.1)
    assert load.belief.speeds.prefill.factor == pytest.approx(1.0, rel=0.1)


def test_a_request_that_ends_before_the_next_step_is_not_queued_again() -> None:
    load, (one, two, *_) = queued(4)
    load_ledger.reserve(load, ask(1).request, 0, 0.2)
    one.on_first_token(0.5)
    two.drop(0.5)
    load.timeline.advance(load, 0.6)
    assert two not in load.timeline.queue
    assert two not in load.timeline.completing
