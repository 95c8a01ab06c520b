"""Tests of learning an engine's speed from the times of its answers."""

from __future__ import annotations

from random import Random

import pytest

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine import first_token_calibration
from policies.engine.step_time import FILLS
from tests.unit.policies.builders import ask

SPAN_S = 0.5


def observe(load: EndpointLoad, spans: int, slower: float, waits_s: float, tight: bool) -> None:
    # Observe spans of one full step each that takes `slower` times as long as it was estimated at
    # first. A prompt waits up to `waits_s` in two of three.
    rng, span = Random(1), load.timeline.span
    now = max(0.0, span.corrected_at) + 1.0
    layers_s = load.belief.shape.step_s
    for number in range(spans):
        span.begin(now)
        span.add(SPAN_S, (FILLS - 1, 1.0), 0.0, 0.0, 0)
        span.waits_for_kv = tight
        wait_s = rng.random() * waits_s if number % 3 else 0.0
        now += slower * SPAN_S * (0.97 + 0.06 * rng.random()) + layers_s + wait_s
        first_token_calibration.learn(span, load, now, now)
        now += 1.0


def full_pace(load: EndpointLoad) -> float:
    return load.belief.paces[-1]


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_an_engine_whose_prompts_always_wait_for_kv_is_learnt(slower: float) -> None:
    load = EndpointLoad(0)
    observe(load, 120, slower, waits_s=3.0, tight=True)
    assert full_pace(load) == pytest.approx(slower, rel=0.15)


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_a_change_is_followed_by_an_engine_that_was_learnt_before(slower: float) -> None:
    load = EndpointLoad(0)
    observe(load, 60, 1.0, waits_s=0.0, tight=False)
    observe(load, 200, slower, waits_s=3.0, tight=True)
    assert full_pace(load) == pytest.approx(slower, rel=0.2)


def test_a_few_waits_between_other_spans_teach_nothing() -> None:
    load = EndpointLoad(0)
    for _ in range(20):
        observe(load, 3, 1.0, waits_s=0.0, tight=False)
        before = list(load.belief.paces)
        observe(load, first_token_calibration.DELAYED_SPANS - 1, 3.0, waits_s=3.0, tight=True)
        assert load.belief.paces == before


def test_spans_with_waits_count_less_than_others() -> None:
    waiting, free = EndpointLoad(0), EndpointLoad(1)
    observe(waiting, first_token_calibration.DELAYED_SPANS, 2.0, waits_s=0.0, tight=True)
    observe(free, 1, 2.0, waits_s=0.0, tight=False)
    assert 1.0 < full_pace(waiting) < full_pace(free)


def test_a_speed_learnt_while_requests_arrive_is_in_the_forecast_for_the_next_one() -> None:
    # Prices divide by the learnt factor, so a forecast with the speed of before makes a slow engine
    # seem a fast one.
    load = EndpointLoad(0)
    first = load_ledger.reserve(load, ask(4000).request, 0, 100.0)
    load_ledger.reserve(load, ask(8000).request, 0, 100.1)
    first.on_first_token(103.0)
    for at_s in (103.5, 103.51):
        load_ledger.reserve(load, ask(4000).request, 0, at_s)
    assert load.belief.speeds.prefill.factor > 1.0
    seen_s = load.prefill_s_per_token
    load.timeline.refresh_forecast(load, 103.51)
    assert seen_s == pytest.approx(load.prefill_s_per_token, rel=1e-4)


def test_idle_time_before_an_answer_that_comes_early_is_no_work() -> None:
    # The engine answers before its prompt is expected to have reached it.
    load = EndpointLoad(0)
    for number in range(50):
        at_s = 100.0 + 10.0 * number
        asked = load_ledger.reserve(load, ask(500).request, 0, at_s)
        asked.on_first_token(at_s + 0.0006)
        asked.finish(at_s + 0.2, 20)
    assert load.belief.speeds.prefill.factor <= 1.0
    assert load.belief.request_s < 0.003
