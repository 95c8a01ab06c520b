"""Tests of learning how many tokens an engine computes per step, from its first tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine.step_budget import LESSONS, BudgetLessons
from policies.engine.step_time import SpeedBelief, shape_for
from policies.load_ledger import LoadReservation
from tests.unit.policies.builders import ask

SHAPE = shape_for("h100", 4, params_b=70.6, weight_bytes=1, request_s=0.0)


def step_s(tokens: int) -> float:
    return max(SHAPE.weights_s, SHAPE.token_s * tokens) + SHAPE.wire_s * tokens + SHAPE.step_s


def run_engine(
    load: EndpointLoad, budget: int, prompts: Sequence[int], *, cached: float = 0.0
) -> None:
    """Compute prompts that arrive 10 ms apart, in steps of `budget` tokens.

    `cached` is the share of each prompt that is cached unknown to the gateway. Answers end with
    their first tokens.
    """
    clock, waiting, arrivals = 0.0, deque[list[int]](), deque(enumerate(prompts))
    entries: list[LoadReservation] = []
    while waiting or arrivals:
        while arrivals and (0.01 * arrivals[0][0] <= clock or not waiting):
            number, tokens = arrivals.popleft()
            clock = max(clock, 0.01 * number)
            entries.append(load_ledger.reserve(load, ask(tokens).request, 0, 0.01 * number))
            waiting.append([number, max(1, round(tokens * (1.0 - cached)))])
        left, ended = budget, []
        while waiting and left:
            taken = min(left, waiting[0][1])
            waiting[0][1] -= taken
            left -= taken
            if not waiting[0][1]:
                ended.append(waiting.popleft()[0])
        clock += step_s(budget - left)
        for number in ended:
            entries[number].on_first_token(clock)
        for number in ended:
            entries[number].finish(clock + 0.0005, 1)


def engine_with_label(budget: int) -> EndpointLoad:
    return EndpointLoad(0, SpeedBelief(replace(SHAPE, budget_tokens=budget)))


@pytest.mark.parametrize("tokens", [(100, 600), (300, 1500)])
@pytest.mark.parametrize("label", [2048, 8192, 16384])
@pytest.mark.parametrize("budget", [2048, 8192])
def test_steps_of_many_prompts_correct_a_wrong_label(
    budget: int, label: int, tokens: tuple[int, int]
) -> None:
    rng, load = Random(budget + label), engine_with_label(label)
    run_engine(load, budget, [rng.randint(*tokens) for _ in range(400)])
    assert load.belief.budget_tokens == budget
    assert load.belief.shape.budget_tokens == label


@pytest.mark.parametrize("seed", range(8))
def test_a_right_label_is_believed_whatever_the_prompts(seed: int) -> None:
    rng, load = Random(seed), engine_with_label(5000)
    run_engine(load, 5000, [round(rng.lognormvariate(6.5, 1.5)) + 1 for _ in range(300)])
    assert load.belief.budget_tokens == 5000


def test_prompts_cached_unknown_to_the_gateway_do_not_make_steps_look_large() -> None:
    load = engine_with_label(2048)
    run_engine(load, 2048, [900] * 300, cached=0.95)
    assert load.belief.budget_tokens == 2048


def test_steps_that_agree_with_the_budget_outweigh_single_ones_that_do_not() -> None:
    lessons = BudgetLessons()
    for _ in range(10):
        lessons.add_larger(9000)
        lessons.add_equal()
    assert lessons.correct(8192) == 8192
    lessons.add_smaller(3000)
    lessons.add_larger(9000)
    assert (lessons.score, lessons.tokens) == (1, 9000)


def test_the_weakest_of_several_bounds_counts() -> None:
    larger, smaller = BudgetLessons(), BudgetLessons()
    for tokens in (7000, 4097, 9000):
        larger.add_larger(tokens)
        smaller.add_smaller(tokens)
    assert (larger.score, larger.tokens) == (LESSONS, 4097)
    assert (larger.correct(2048), larger.score) == (8192, 0)
    assert (smaller.score, smaller.tokens) == (-LESSONS, 9000)
    assert (smaller.correct(16384), smaller.score) == (8192, 0)
    for _ in range(LESSONS):
        larger.add_larger(4096)
    assert larger.correct(2048) == 4096
