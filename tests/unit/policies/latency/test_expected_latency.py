"""Tests of expected latencies: initial values, and what is learned from first tokens."""

from __future__ import annotations

from math import ceil, inf
from random import Random

import pytest

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.engine.first_token_calibration import SHORT_S
from policies.engine.peer_load import PeerShare
from policies.engine.step_time import NEUTRAL, SpeedBelief, StepCosts, shape_for
from policies.latency.expected_latency import backlog_s, tpot_s, ttft_s, ttfts
from policies.load_ledger import LoadReservation, set_peer_load
from policies.routing_types import Candidate, Endpoint, Request

SHAPE = shape_for("h100", 4, params_b=70.6, weight_bytes=1, request_s=0.0)


def load_of(shape: StepCosts = SHAPE) -> EndpointLoad:
    return EndpointLoad(0, SpeedBelief(shape))


def request(prompt: int = 8000, output: int = 100) -> Request:
    return Request("id", "m", "t", prompt, output)


def serve(
    load: EndpointLoad,
    now: float,
    slowness: float,
    prompt: int = 6000,
    tokens: int = 50,
    attention: float = 1.0,
    foreseen: list[float] | None = None,
) -> float:
    # Serve one request alone on an engine that is `slowness` times slower than expected.
    #
    # Returns the time of its end. `attention` is an additional factor on the computation of
    # attention. The predicted TTFT in seconds is appended to `foreseen`.
    entry: LoadReservation = load_ledger.reserve(load, request(prompt), 0, now)
    if foreseen is not None:
        assert entry.predicted_ttft_s is not None
        foreseen.append(entry.predicted_ttft_s)
    tokens_s, pairs_s = (
        (SHAPE.token_s + SHAPE.wire_s) * prompt,
        attention * SHAPE.pair_s * prompt * prompt / 2,
    )
    now += slowness * (tokens_s + pairs_s + SHAPE.step_s * ceil(prompt / SHAPE.budget_tokens))
    entry.on_first_token(now)
    now += slowness * (tokens - 1) * (SHAPE.weights_s + SHAPE.step_s + SHAPE.context_s * prompt)
    entry.finish(now, tokens)
    return now


def test_the_prior_of_a_70b_model_on_four_h100_is_near_the_measured_grid() -> None:
    load = load_of()
    assert ttft_s(load, 4000, 0, 0.0) == pytest.approx(0.211, rel=0.2)
    assert ttft_s(load, 32_000, 0, 0.0) == pytest.approx(1.976, rel=0.2)
    assert tpot_s(load, 4000) == pytest.approx(0.0107, rel=0.2)


def test_what_is_unknown_of_a_layout_is_neutral_and_more_gpus_are_faster() -> None:
    assert shape_for(tp=4) == NEUTRAL
    assert shape_for("nobody's", 4) == NEUTRAL
    small, large = shape_for("h100", 2, params_b=70), shape_for("h100", 8, params_b=70)
    assert large.token_s < small.token_s
    assert large.weights_s < small.weights_s
    assert shape_for("h100", 2, 2, params_b=70).weights_s == small.weights_s


@pytest.mark.parametrize("slowness", [3.0, 0.4])
def test_an_endpoint_unlike_its_prior_is_known_within_twenty_requests(slowness: float) -> None:
    load, now = load_of(), 0.0
    for _ in range(20):
        now = serve(load, now + 1.0, slowness)
    assert load.belief.pace(6000) == pytest.approx(slowness, rel=0.05)
    assert load.belief.speeds.step.factor == pytest.approx(slowness, rel=0.05)


@pytest.mark.parametrize("attention", [1.0, 2.5, 0.5])
def test_attention_is_known_apart_so_that_long_prompts_are_foreseen_as_well_as_short_ones(
    attention: float,
) -> None:
    # The model has an unexpected depth or width, or 8-bit weights, which do not speed up attention.
    load, now, off = load_of(), 0.0, list[float]()
    for number in range(60):
        for prompt in (2000, 60_000, 8000, 24_000):
            began = now + 30.0
            foreseen = list[float]()
            now = serve(load, began, 1.0, prompt, 1, attention, foreseen)
            if number >= 10:
                off.append(abs(foreseen[0] / (now - began) - 1.0))
    assert len(off) == 200
    assert max(off) < 0.1  # 0.31 with one factor for all of a prompt's work
    assert load.belief.speeds.pairs.factor == pytest.approx(attention, rel=0.25)


def test_one_that_is_throttled_and_recovers_is_followed_both_ways() -> None:
    load, now = load_of(), 0.0
    for slowness in (1.0, 3.0, 1.0):
        for _ in range(60 if now == 0.0 else 20):
            now = serve(load, now + 1.0, slowness)
        assert load.belief.pace(6000) == pytest.approx(slowness, rel=0.1)
        assert load.belief.speeds.step.factor == pytest.approx(slowness, rel=0.1)


@pytest.mark.parametrize("prompt", [60_000, 120_000])
def test_one_that_is_throttled_is_followed_without_swinging_where_prompts_are_mostly_attention(
    prompt: int,
) -> None:
    # The factors of a prompt's work and of its attention must not both absorb the same error.
    load, now = load_of(), 0.0
    for slowness in (1.0, 3.0, 1.0):
        off = list[float]()
        for _ in range(20):
            foreseen, began = list[float](), now + 1.0
            now = serve(load, began, slowness, prompt, tokens=1, foreseen=foreseen)
            off.append(abs(foreseen[0] / (now - began) - 1.0))
        assert max(off[3:]) < 0.15


def test_one_odd_first_token_hardly_moves_a_settled_belief() -> None:
    load, now = load_of(), 0.0
    for _ in range(60):
        now = serve(load, now + 1.0, 1.0)
    serve(load, now + 1.0, 4.0, tokens=2)
    assert load.belief.speeds.prefill.factor == pytest.approx(1.0, abs=0.1)


def test_a_reservation_whose_answer_comes_whole_decodes_from_the_handover_and_teaches_nothing() -> (
    None
):
    load = load_of()
    entry = load_ledger.reserve_decode(load, request(), 8000, 1.0, sees_first_token=False)
    assert (load.decoding, load.timeline.batch) == (0, 0)
    entry.on_kv_arrived(2.0)
    entry.on_kv_arrived(2.5)
    assert (load.decoding, load.timeline.batch) == (1, 1)
    entry.finish(60.0, 100)
    assert (load.decoding, load.timeline.batch, load.decode_tokens) == (0, 0, 0)
    assert load.belief.speeds.step.factor == 1.0


def test_a_queue_is_waited_for_and_given_back_token_by_token() -> None:
    load = load_of()
    alone = ttft_s(load, 8000, 0, 0.0)
    first = load_ledger.reserve(load, request(), 0, 0.0)
    load_ledger.reserve(load, request(), 0, 0.0)
    assert ttft_s(load, 8000, 0, 0.0) == pytest.approx(3 * alone, rel=0.1)
    first.on_first_token(alone)
    assert ttft_s(load, 8000, 0, alone) == pytest.approx(2 * alone, rel=0.1)


def test_a_first_token_that_is_late_is_expected_to_be_as_late_again() -> None:
    load = load_of()
    entry = load_ledger.reserve(load, request(), 0, 0.0)
    predicted = entry.predicted_ttft_s
    assert predicted is not None
    assert load.next_first_token_at == pytest.approx(predicted, rel=0.1)
    late = predicted + 5.0
    assert backlog_s(load, late) == pytest.approx(late - load.next_first_token_at, abs=0.1)
    entry.on_first_token(late)
    assert load.next_first_token_at == inf


def test_a_prompt_without_free_kv_waits_for_answers_to_end() -> None:
    load, now = load_of(), 0.0
    scraped_load.record_scrape(load, None, None, None, 50_000, 0.0)
    for _ in range(5):
        load_ledger.reserve(load, request(), 0, now).on_first_token(now + 0.4)
        now += 0.4
    calm = ttft_s(load, 1000, 0, now)
    assert ttft_s(load, 9000, 0, now) < 20 * calm
    assert ttft_s(load, 12_000, 0, now) > ttft_s(load, 9000, 0, now) + 0.1


def test_shared_prefixes_need_no_wait_once_a_scrape_shows_free_kv() -> None:
    load, now = load_of(), 0.0
    scraped_load.record_scrape(load, None, None, None, 50_000, now)
    for _ in range(6):
        load_ledger.reserve(load, request(output=1000), 6000, now).on_first_token(now + 0.2)
        now += 0.2
    entry = load_ledger.reserve(load, request(output=1000), 6000, now)
    before = entry.predicted_ttft_s
    entry.on_first_token(now + 0.2)
    for _ in range(40):
        now += 0.05
        scraped_load.record_scrape(load, None, None, 0.4, None, now)
    after = load_ledger.reserve(load, request(output=1000), 6000, now).predicted_ttft_s
    assert before is not None
    assert after is not None
    assert after < 0.3 * before


def test_kv_that_another_endpoint_still_computes_does_not_make_an_engine_look_roomy() -> None:
    load = load_of()
    scraped_load.record_scrape(load, None, None, None, 50_000, 0.0)
    load_ledger.reserve(load, request(20_000), 0, 0.0).on_first_token(1.5)
    for _ in range(3):
        load_ledger.reserve_decode(load, request(10_000), 0, 1.5)
    free = load.free_kv_tokens
    for step in range(40):
        scraped_load.record_scrape(load, 1, 0, 0.4, None, 1.5 + 0.05 * step)
    assert load.timeline.kv_ratio == pytest.approx(1.0, abs=0.01)
    assert load.free_kv_tokens == pytest.approx(free, abs=500)


def test_simultaneous_first_tokens_belong_to_one_step() -> None:
    load = load_of()
    first = [load_ledger.reserve(load, request(2000), 0, 0.0) for _ in range(3)]
    second = [load_ledger.reserve(load, request(2000), 0, 0.01) for _ in range(2)]
    for entry in first:
        entry.on_first_token(0.33)
    assert (load.timeline.batch, load.timeline.queued_tokens) == (3, 4000)
    third = load_ledger.reserve(load, request(2000), 0, 0.34)
    alone = ttft_s(load_of(), 2000, 0, 0.0)
    assert third.predicted_ttft_s == pytest.approx(3 * alone, rel=0.15)
    for entry in second:
        entry.on_first_token(0.55)
    assert (load.timeline.batch, load.timeline.queued_tokens) == (5, 2000)


def test_api_latency_is_learned_from_first_tokens_of_an_idle_engine() -> None:
    load, now, late_s = load_of(), 0.0, 0.02
    for _ in range(100):
        now += 5.0
        entry = load_ledger.reserve(load, request(500), 0, now)
        assert entry.predicted_ttft_s is not None
        entry.on_first_token(now + late_s + ttft_s(load_of(), 500, 0, 0.0))
        entry.drop(now + 1.0)
    assert load.belief.request_s == pytest.approx(late_s, rel=0.1)
    assert load.belief.layers.factors == [1.0]


def test_what_the_way_costs_is_learnt_from_long_steps_too_where_others_decode() -> None:
    # API latency decides which decode step a prompt joins.
    #
    # Slow steps of the same size would look nearly the same.
    load, late_s, boundary = load_of(), 0.02, 0.1
    load_ledger.reserve(load, request(500, 10_000), 0, 0.0).on_first_token(boundary)
    step_s = tpot_s(load, 500)
    for number in range(160):
        prompt = (2400, 2400, 2400, 16_000)[number % 4]
        now = boundary + 1.0 + 0.37 * number % 1.0
        entry = load_ledger.reserve(load, request(prompt), 0, now)
        begins = boundary + ceil((now + late_s - boundary) / step_s) * step_s
        boundary = begins + ttft_s(load_of(), prompt, 0, 0.0) + step_s - SHAPE.step_s
        assert boundary - begins > SHORT_S
        if number > 40:
            assert entry.predicted_ttft_s == pytest.approx(boundary - now, rel=0.1)
        entry.on_first_token(boundary)
        entry.drop(boundary)
    assert 0.2 * late_s < load.belief.request_s < late_s


def test_external_requests_slow_every_step() -> None:
    load = load_of()
    before = load.decode_s_per_token
    scraped_load.record_scrape(load, 40, 0, None, None, 1.0)
    scraped_load.record_scrape(load, 40, 0, None, None, 2.0)
    assert load.external_requests == 40
    assert load.decode_s_per_token > before


def test_a_request_scraped_before_its_gateway_announces_it_is_not_external() -> None:
    load = load_of()
    scraped_load.record_scrape(load, 3, 0, None, None, 1.0)
    assert load.external_requests == 0
    scraped_load.record_scrape(load, 1, 1, None, None, 2.0)
    assert load.external_requests == 2
    scraped_load.record_scrape(load, 0, 0, None, None, 3.0)
    assert load.external_requests == 0


def test_an_unreported_first_token_does_not_block_other_prompts() -> None:
    load = load_of()
    load_ledger.reserve(load, request(), 0, 0.0, sees_first_token=False)
    scraped_load.record_scrape(load, 1, 0, None, None, 10.0)
    assert (load.prefill_tokens, load.decode_tokens, load.decoding) == (0, 8000, 1)
    assert backlog_s(load, 10.0) == 0.0


def test_ttfts_of_many_candidates_equal_single_ones() -> None:
    loads = [EndpointLoad(slot) for slot in range(4)]
    for times, load in enumerate(loads):
        for _ in range(times):
            load_ledger.reserve(load, request(), 0, 0.0)
    candidates = [Candidate(Endpoint(f"tp{load.slot}", "u", "p", "m"), load) for load in loads]
    holdings = [0, 100, 5000, 0]
    alone = [
        ttft_s(load, 6000 - cached, cached, 0.1)
        for load, cached in zip(loads, holdings, strict=True)
    ]
    assert ttfts(candidates, holdings, 6000, 0.1) == pytest.approx(alone)


def test_an_engine_shared_with_other_gateways_is_learned_more_slowly() -> None:
    alone, shared, now = load_of(), load_of(), 0.0
    for number in range(200):
        now += 10.0
        set_peer_load(shared, b"peer", PeerShare(prefill_tokens=6000), now)
        for load, more in ((alone, 1.0), (shared, 2.0 if number % 2 else 1.0)):
            entry = load_ledger.reserve(load, request(6000), 0, now)
            entry.on_first_token(now + more * ttft_s(load_of(), 6000, 0, 0.0) * 2.0)
            entry.drop(now + 5.0)
        if number == 3:
            assert shared.belief.speeds.prefill.var > 2 * alone.belief.speeds.prefill.var
    assert alone.belief.speeds.prefill.factor == pytest.approx(2.0, rel=0.1)
    assert 1.0 < shared.belief.speeds.prefill.factor < 3.0


def test_undone_steps_under_load_of_other_gateways_do_not_change_the_context_factor() -> None:
    rng, load, now = Random(53), EndpointLoad(0, SpeedBelief(shape_for("h100", 4, 1, 70))), 1.0
    waiting, decoding = list[LoadReservation](), list[tuple[LoadReservation, float]]()
    for _ in range(300):
        now += rng.expovariate(5.0)
        what = rng.random()
        if what < 0.3:
            waiting.append(
                load_ledger.reserve(load, request(rng.choice((200, 4000, 60_000)), 300), 0, now)
            )
        elif what < 0.45:
            context = rng.choice((0, 10_000, 1_000_000, 4_000_000))
            set_peer_load(load, b"peer", PeerShare(10, 10, 0, context, 1000, 1000, 10), now)
        elif what < 0.75 and waiting:
            entry = waiting.pop(rng.randrange(len(waiting)))
            entry.on_first_token(now)
            decoding.append((entry, now))
        elif decoding:
            entry, began = decoding.pop(rng.randrange(len(decoding)))
            entry.finish(now, max(1, int((now - began) / 0.03)))
        assert 0.0 < load.belief.speeds.step.factor < 10.0
