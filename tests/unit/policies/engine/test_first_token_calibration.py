"""Tests of learning an engine's speed from the times of its answers."""

from __future__ import annotations

from random import Random

import pytest

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine import first_token_calibration
from policies.engine.step_time import FILLS, SpeedBelief, shape_for
from tests.unit.policies.builders import ask

SPAN_S = 0.5


def observe(load: EndpointLoad, spans: int, slower: float, waits_s: float, tight: bool) -> None:
    # Let the model observe spans of one full step each. A step takes `slower` times as long as the
    # first estimate. In two of three spans, a prompt waits up to `waits_s` seconds.
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
    # Prices divide by the learnt factor. If the forecast still had the earlier speed, a slow engine
    # would seem fast.
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


def test_a_step_that_tells_more_than_is_known_is_learnt_while_prompts_wait() -> None:
    # A burst may last less than a second, so a slow engine must be noticed before the burst ends.
    load = EndpointLoad(0)
    first = load_ledger.reserve(load, ask(4000).request, 0, 0.0)
    load_ledger.reserve(load, ask(4000).request, 0, 0.1)
    expected_s = load.next_first_token_at
    first.on_first_token(3.0 * expected_s)
    load_ledger.reserve(load, ask(4000).request, 0, 3.0 * expected_s + 0.1)
    assert 3.0 * expected_s < first_token_calibration.LEARN_S
    assert load.timeline.queue
    assert load.belief.speeds.prefill.factor > 2.0


def test_spans_shorter_than_the_prefill_expected_in_them_show_that_it_is_faster() -> None:
    # The label names a GPU that is many times slower than the real one.
    labelled, real = shape_for("l40s", 4, params_b=70.6), shape_for("h100", 4, params_b=70.6)
    load, now = EndpointLoad(0, SpeedBelief(labelled)), 0.0
    seen_s = real.request_s + real.step_s + max(500 * real.token_s, real.weights_s)
    assert seen_s < first_token_calibration.SHORT_S
    for _ in range(8):
        entry = load_ledger.reserve(load, ask(500).request, 0, now)
        entry.on_first_token(now + seen_s)
        entry.drop(now + 0.5)
        now += 1.0
    assert labelled.token_s * load.belief.speeds.prefill.factor < 2.0 * real.token_s


def test_the_first_step_of_a_burst_shows_the_api_latency() -> None:
    load = EndpointLoad(0)
    entries = [load_ledger.reserve(load, ask(500).request, 0, at) for at in (0.0, 0.01, 0.02)]
    first_s = load.next_first_token_at + 0.01
    assert first_s < first_token_calibration.SHORT_S
    entries[0].on_first_token(first_s)
    load_ledger.reserve(load, ask(500).request, 0, first_s + 0.02)
    assert load.belief.request_s > load.belief.shape.request_s + 0.002
