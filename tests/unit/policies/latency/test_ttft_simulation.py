"""Tests of the simulated time to first token: steps, later requests, memory, shared prefixes."""

from __future__ import annotations

import pytest

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.engine.engine_load import EngineLoad
from policies.engine.engine_model_updates import EngineTimeline
from policies.engine.output_length import RecentLengths
from policies.engine.queued_prompt import QueuedPrompt
from policies.engine.recent_work_averages import ArrivalAverages
from policies.engine.shared_prefix_kv import SharedPrefixKv
from policies.engine.step_time import SpeedBelief, shape_for
from policies.latency import ttft_simulation
from policies.latency.ttft_simulation import (
    MOST_STEPS,
    decoding_ttft_s,
    idle_ttft_s,
    run_simulation,
)
from policies.routing_types import Request

SHAPE = shape_for("h100", 4, params_b=70.6, weight_bytes=1, request_s=0.0)


def load_of(kv_tokens: int | None = None) -> EndpointLoad:
    load = EndpointLoad(0, SpeedBelief(SHAPE))
    if kv_tokens is not None:
        scraped_load.record_scrape(load, None, None, None, kv_tokens, 0.0)
    return load


def request(prompt: int, output: int = 100) -> Request:
    return Request("id", "m", "t", prompt, output)


def predicted_ttft(load: EndpointLoad, prompt: int, now: float, cached: int = 0) -> float:
    entry = load_ledger.reserve(load, request(prompt), cached, now)
    assert entry.predicted_ttft_s is not None
    entry.drop(now)
    return entry.predicted_ttft_s


def step_s(tokens: int) -> float:
    work_s = max(SHAPE.token_s * tokens, SHAPE.weights_s) + SHAPE.wire_s * tokens
    return work_s + SHAPE.pair_s * tokens * tokens / 2 + SHAPE.step_s


def test_a_prompt_that_fits_one_step_takes_that_step() -> None:
    assert predicted_ttft(load_of(), 5000, 0.0) == pytest.approx(step_s(5000))


@pytest.mark.parametrize("arrivals", [0, 200])
@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (500, 0), (6_000, 5_000), (8_192, 100)])
def test_the_time_at_an_idle_engine_is_that_of_the_simulation(
    tokens: int, cached: int, arrivals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_of()
    for number in range(arrivals):
        load_ledger.reserve(load, request(500), 0, 0.05 * number).drop(0.05 * number)
    pairs = list[tuple[float, float]]()

    def compared(timeline: EngineTimeline, load: EngineLoad, prompt: QueuedPrompt) -> float:
        pairs.append(
            (idle_ttft_s(timeline, load, prompt), run_simulation(timeline, load, prompt, 20.0))
        )
        return pairs[0][0]

    monkeypatch.setattr(ttft_simulation, "idle_ttft_s", compared)
    predicted_ttft(load, tokens, 20.0, cached)
    ((short, simulated),) = pairs
    assert short == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("arrivals", [0, 200])
@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (500, 0), (6_000, 5_000), (7_900, 0)])
@pytest.mark.parametrize("now", [20.0, 20.0113, 31.7])
def test_the_time_at_an_engine_that_only_decodes_is_that_of_the_simulation(
    tokens: int, cached: int, arrivals: int, now: float
) -> None:
    load = load_of(200_000)
    for number in range(arrivals):
        load_ledger.reserve(load, request(500), 0, 0.05 * number).drop(0.05 * number)
    for _ in range(3):
        load_ledger.reserve(load, request(3000, 900), 0, 19.0).on_first_token(20.0)
    entry = load_ledger.reserve(load, request(tokens), cached, now)
    timeline = load.timeline
    timeline.remove_from_queue(entry)
    seconds = decoding_ttft_s(timeline, load, entry, now)
    assert seconds == entry.predicted_ttft_s
    assert seconds == run_simulation(timeline, load, entry, now)


@pytest.mark.parametrize(("prompt", "kv_tokens"), [(9000, 200_000), (5000, 10_000)])
def test_a_prompt_of_several_steps_or_without_free_kv_is_simulated(
    prompt: int, kv_tokens: int
) -> None:
    load = load_of(kv_tokens)
    for _ in range(3):
        load_ledger.reserve(load, request(3000, 900), 0, 19.0).on_first_token(20.0)
    entry = load_ledger.reserve(load, request(prompt), 0, 20.1)
    timeline = load.timeline
    timeline.remove_from_queue(entry)
    assert decoding_ttft_s(timeline, load, entry, 20.1) is None
    assert entry.predicted_ttft_s == run_simulation(timeline, load, entry, 20.1)


def test_nothing_is_predicted_of_an_answer_that_comes_whole() -> None:
    load = load_of()
    whole = load_ledger.reserve(load, request(3000), 0, 20.0, False)
    assert (whole.predicted_ttft_s, whole.predicted_tpot_s) == (None, None)
    streamed = load_of()
    load_ledger.reserve(streamed, request(3000), 0, 20.0)
    assert load.prefill_done_at == streamed.prefill_done_at
    assert load.decode_s_per_token == streamed.decode_s_per_token


def test_a_prompt_that_comes_during_a_step_waits_for_its_end_and_not_for_those_behind() -> None:
    load = load_of()
    load_ledger.reserve(load, request(5000), 0, 0.0)
    scraped_load.record_scrape(load, None, None, None, None, 0.001)  # the first step is running
    assert predicted_ttft(load, 2000, 0.01) == pytest.approx(
        step_s(5000) - 0.01 + step_s(2000), rel=0.01
    )


def test_prompts_that_usually_arrive_are_expected_in_the_step_that_completes_one() -> None:
    busy, calm = load_of(), load_of()
    for number in range(200):
        now = 0.05 * number
        load_ledger.reserve(busy, request(500), 0, now).drop(now)
    for load in (busy, calm):
        load_ledger.reserve(load, request(8000), 0, 10.0)
        scraped_load.record_scrape(load, None, None, None, None, 10.001)
    assert predicted_ttft(busy, 1000, 10.01) > 1.2 * predicted_ttft(calm, 1000, 10.01)


def test_few_arrivals_are_not_expected_within_a_time_in_which_most_prompts_meet_none() -> None:
    arrivals = ArrivalAverages(0.0)
    for number in range(20):
        arrivals.record(1000, 2.0 * number)
    assert arrivals.expected_tokens_behind(1.0) == 0.0
    assert 3000.0 < arrivals.expected_tokens_behind(12.0) < 6000.0


def test_a_burst_at_the_beginning_is_no_rate() -> None:
    arrivals = ArrivalAverages(0.0)
    for _ in range(10):
        arrivals.record(1000, 0.01)
    assert arrivals.expected_tokens_behind(5.0) == 0.0


def test_a_wait_for_kv_ends_with_an_answer_of_usual_length() -> None:
    load, now = load_of(50_000), 0.0
    for _ in range(100):  # answers of 200 tokens where 100 were expected
        entry = load_ledger.reserve(load, request(100), 0, now)
        entry.on_first_token(now + 0.03)
        now += 3.0
        entry.finish(now, 200)
    load_ledger.reserve(load, request(40_000), 0, now).on_first_token(now + 3.0)
    told_s = predicted_ttft(load, 20_000, now + 3.0)
    assert told_s == pytest.approx(
        200 * load.timeline.decode_s + predicted_ttft(load_of(), 20_000, 0.0), rel=0.15
    )


def test_a_prompt_with_a_shared_prefix_needs_kv_for_the_rest_only() -> None:
    load, now = load_of(50_000), 0.0
    for _ in range(6):
        load_ledger.reserve(load, request(8000), 7500, now).on_first_token(now + 0.03)
        now += 0.03
    crowded = predicted_ttft(load, 8000, now, 7500)
    scraped_load.record_scrape(load, None, None, (7500 + 6 * 500) / 50_000, None, now)
    assert crowded > 5 * predicted_ttft(load, 8000, now, 7500)


def test_a_first_token_that_does_not_come_where_kv_is_full_is_taken_to_wait_for_it_while_others_decode() -> (
    None
):
    load = load_of(50_000)
    answer = load_ledger.reserve(load, request(41_000), 0, 0.0)
    answer.on_first_token(3.0)
    load_ledger.reserve(load, request(8000), 0, 3.0)
    timeline = load.timeline
    timeline.advance(load, 3.1)
    assert (timeline.is_busy, len(timeline.queue)) == (True, 0)
    ticks = timeline.steps
    timeline.advance(load, 5.0)
    assert (timeline.is_busy, len(timeline.queue), timeline.queued_tokens) == (False, 1, 8000)
    assert timeline.steps - ticks == pytest.approx(2.0 / timeline.decode_s, rel=0.02)
    answer.finish(5.0, 100)
    timeline.advance(load, 5.1)
    assert timeline.is_busy


def test_a_prompt_that_lacks_less_kv_than_the_models_error_does_not_wait() -> None:
    load = load_of(50_000)
    load_ledger.reserve(load, request(42_000), 0, 0.0).on_first_token(3.0)
    alone_s = predicted_ttft(load_of(), 8000, 0.0)
    assert predicted_ttft(load, 8500, 3.0) == pytest.approx(alone_s, rel=0.15)
    assert predicted_ttft(load, 8900, 3.0) > 5 * alone_s


def test_a_first_token_despite_full_modelled_kv_corrects_kv_and_steps() -> None:
    load, now = load_of(50_000), 0.0
    for _ in range(6):  # all prompts share one prefix, which no scrape has shown yet
        load_ledger.reserve(load, request(8000), 7500, now).on_first_token(now + 0.1)
        now += 0.1
    entry = load_ledger.reserve(load, request(8000), 7500, now)
    timeline = load.timeline
    timeline.advance(load, now + 0.05)
    steps, lacking = (
        timeline.prefill_steps,
        timeline.needed_kv_tokens(entry) - timeline.free_kv_tokens(load),
    )
    assert (timeline.is_busy, lacking > 5000) == (False, True)
    entry.on_first_token(now + 0.1)
    assert (timeline.prefill_steps, timeline.queued_tokens) == (steps + 1, 0)
    assert 0.0 <= timeline.free_kv_tokens(load) < lacking


def test_what_a_prefix_takes_is_held_once_by_all_and_gone_with_the_last() -> None:
    prefixes = SharedPrefixKv()
    prefixes.add(1000)
    assert (prefixes.tokens, prefixes.distinct, prefixes.exclusive_share()) == (1000, 1000.0, 1.0)
    prefixes.tokens, prefixes.distinct = 10_000, 1000.0
    prefixes.add(1000)
    assert prefixes.distinct == pytest.approx(1010.0)
    for _ in range(11):
        prefixes.remove(1000)
    assert (prefixes.tokens, prefixes.distinct) == (0, 0.0)


def test_what_is_left_of_an_answer_is_as_of_those_that_came_as_far() -> None:
    lately = RecentLengths()
    for number in range(500):
        lately.record(100 + number % 100, 50)
    assert lately.remaining_tokens(0, 50, 0.0) == pytest.approx(100)
    assert lately.remaining_tokens(0, 50, 0.5) == pytest.approx(150, abs=2)
    assert lately.remaining_tokens(180, 50, 0.5) == pytest.approx(10, abs=2)
    assert lately.remaining_tokens(500, 50, 0.5) == 500


def test_steps_that_are_not_full_have_a_pace_of_their_own() -> None:
    load, now = load_of(), 0.0
    for number in range(300):
        tokens, slower = (8192, 1.0) if number % 2 else (2048, 1.15)
        entry = load_ledger.reserve(load, request(tokens), 0, now)
        prompts_s = slower * (step_s(tokens) - SHAPE.step_s) + SHAPE.step_s
        entry.on_first_token(now + prompts_s)
        entry.drop(now + 1.0)
        now += 2.0
    belief = load.belief
    assert belief.pace(8192) == pytest.approx(1.0, abs=0.03)
    assert belief.pace(2048) == pytest.approx(1.15, abs=0.03)


def test_behind_a_very_long_queue_the_formula_is_close_to_the_simulation() -> None:
    played, reckoned = load_of(), load_of()
    for load, prompts in ((played, MOST_STEPS), (reckoned, MOST_STEPS + 1)):
        for _ in range(prompts):
            load_ledger.reserve(load, request(3000), 0, 0.0)
    longer_s = predicted_ttft(reckoned, 3000, 0.0) - predicted_ttft(played, 3000, 0.0)
    assert abs(longer_s) < 0.1 * predicted_ttft(played, 3000, 0.0)


def test_a_prompt_that_fills_all_kv_alone_waits_for_no_other() -> None:
    load = load_of(kv_tokens=5000)
    entry = load_ledger.reserve(load, request(5000), 0, 0.0)
    scraped_load.record_scrape(load, None, None, None, None, 0.001)
    entry.drop(500.0)
    assert load.timeline.kv_prompts == 0
    assert predicted_ttft(load, 5000, 501.0) == pytest.approx(step_s(5000), rel=0.01)


def test_kv_computed_elsewhere_blocks_no_prompt_before_it_arrives() -> None:
    load = load_of(kv_tokens=10_000)
    coming = load_ledger.reserve_decode(load, request(9000), 0, 0.0)
    assert predicted_ttft(load, 3000, 0.0) == pytest.approx(step_s(3000), rel=0.01)
    whole = load_ledger.reserve(load, request(3000), 0, 0.0)
    whole.on_first_token(step_s(3000))
    assert load.timeline.free_kv_tokens(load) == 7000
    assert load.free_kv_tokens < 0  # the forecast for picks includes what is expected
    coming.on_first_token(1.0)
    assert predicted_ttft(load, 3000, 1.0) > 2 * step_s(3000)
