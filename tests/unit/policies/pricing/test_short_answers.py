"""Tests of what a prefill costs short answers."""

from __future__ import annotations

from math import inf

import pytest

from policies.engine.running_answer_lengths import WAITING, AgeGroup
from policies.pricing.endpoint_price import PricedPolicy
from policies.pricing.short_answers import harm_of_short, loss

CURVE = PricedPolicy()
PACE = 0.1
CHUNK = 4.0
"""Prefill that fits in a step, in budgets of one token: one step makes four tokens late."""


def answers(steps: float, age: int, left: float | None = None) -> AgeGroup:
    each = 1.0, steps, steps if left is None else left
    return 1.0, 1.0 / (steps + 1.0), 0.0, inf, 1.0, 1.0, 1.0, age, (each,)


def harm(group: AgeGroup, ahead: float, work: float) -> float:
    return harm_of_short(group, 0.0, (ahead, work, CHUNK), (PACE, PACE), CURVE)


def mean_harm(steps: int, ahead: float, work: float) -> float:
    # Return the loss of an answer whose prompt is at one of many places in the queue.
    most, places = steps * CHUNK, 10_000

    def of_delay(delay: float) -> float:
        return loss(PACE + min(most, delay) / steps, CURVE.late, CURVE.overdue)

    behind = [ahead * (place + 0.5) / places for place in range(places)]
    return sum(of_delay(each + work) - of_delay(each) for each in behind) / places


@pytest.mark.parametrize("steps", [1, 2, 4, 7, 12, 19])
@pytest.mark.parametrize("ahead", [0.0, 0.3, 2.0, 30.0, 500.0])
@pytest.mark.parametrize("work", [0.2, 3.0, 60.0])
def test_an_answer_that_waits_may_be_anywhere_in_the_queue(
    steps: int, ahead: float, work: float
) -> None:
    assert harm(answers(steps, WAITING), ahead, work) == pytest.approx(
        mean_harm(steps, ahead, work), rel=1e-3, abs=1e-6
    )


def test_an_answer_that_ends_before_a_queued_prompt_is_computed_loses_nothing() -> None:
    running = answers(4, 0, left=2.5)
    assert harm(running, ahead=9.0, work=2.0) > 0.0
    assert harm(running, ahead=10.0, work=2.0) == 0.0
    assert harm_of_short(running, 0.0, (10.0, 2.0, CHUNK), (PACE, 0.5), CURVE) == 0.0


def test_a_prefill_is_spread_over_the_steps_after_the_first_token() -> None:
    expected = loss(PACE + 2.0 / 4.0, CURVE.late, CURVE.overdue) - PACE**3
    assert harm(answers(4, 0), ahead=0.0, work=2.0) == pytest.approx(expected)


def test_a_prefill_behind_a_long_queue_harms_only_the_answers_close_before_it() -> None:
    queued = answers(4, WAITING)
    near, far = (harm(queued, ahead, 4.0) for ahead in (16.0, 160.0))
    assert far == pytest.approx(near / 10.0, rel=0.1)


def test_prefills_that_an_answer_has_had_count_for_its_pace() -> None:
    running = answers(9, 0)
    fresh, delayed = (
        harm_of_short(running, past, (0.0, 2.0, CHUNK), (PACE, PACE), CURVE) for past in (0.0, 5.0)
    )
    assert delayed > 2.0 * fresh
