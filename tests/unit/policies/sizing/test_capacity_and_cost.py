"""Tests of capacity and cost: Little's law, prices by engine time, and shares that add up."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.arithmetic_intensity import matrix_intensity
from policies.sizing.replica_count import (
    ceiling_of,
    concurrency_of,
    replicas_for,
    replicas_for_wait,
    wait_quantile_s,
)
from policies.sizing.token_cost import (
    EngineShare,
    RequestSeconds,
    RequestShare,
    decode_weight,
    token_prices,
    tp_tax,
    usd_of,
    usd_per_million,
)


def test_ten_requests_a_second_of_12_s_need_five_replicas_of_24() -> None:
    concurrency = concurrency_of(10, 12)
    assert concurrency == 120
    assert replicas_for(concurrency, 24) == 5


@given(st.floats(0.1, 1e6), st.integers(1, 10_000))
def test_replicas_hold_the_load_and_one_less_does_not(load: float, ceiling: int) -> None:
    count = replicas_for(load, ceiling)
    assert count * ceiling >= load * (1 - 1e-8)
    assert count == 1 or (count - 1) * ceiling < load


def test_a_replica_that_holds_nothing_is_refused_instead_of_bought_without_end() -> None:
    with pytest.raises(ValueError, match="at least one request at a time, not 0"):
        replicas_for(10, 0)


def test_the_smallest_limit_is_the_ceiling() -> None:
    assert ceiling_of(48, 30, 24) == 24
    assert ceiling_of(48, 30, None) == 30
    assert ceiling_of(20, 30, 24) == 20


def test_dollars_per_million_tokens() -> None:
    # 427 tokens/s per GPU at $2.50 per hour.
    assert usd_per_million(2.5, 2, 2 * 427) == pytest.approx(1.63, abs=0.005)
    assert usd_per_million(2.5, 4, 4 * 349) == pytest.approx(1.99, abs=0.005)
    assert tp_tax(349, 427) == pytest.approx(-0.18, abs=0.005)


def test_prices_of_a_request_add_up_to_its_seconds() -> None:
    use = RequestSeconds(3600, 2400, 200, 0.18, 0.02, 0.09)
    prices = token_prices(use, 2.5, 4)
    prompt, cached, answer = (
        price or 0.0 for price in (prices.prompt, prices.cached, prices.answer)
    )
    total = 3600 * prompt + 2400 * cached + 200 * answer
    assert total / 1e6 == pytest.approx(usd_of(2.5, 4, use.total_s))
    assert 0 < cached < prompt < answer


def test_a_kind_of_token_that_a_request_lacks_has_no_price() -> None:
    assert token_prices(RequestSeconds(10, 0, 5, 1, 0, 1), 2.5, 1).cached is None


def test_two_decoding_requests_pay_half_each_and_one_alone_pays_all() -> None:
    engine = EngineShare(0.0)
    first = engine.enter(0.0, 0.5)
    second = engine.enter(2.0, 0.5)
    assert engine.change(6.0, first, 0) == 2 + 2
    assert engine.change(7.0, second, 0) == 2 + 1
    engine.advance(10.0)
    assert (engine.busy_s, engine.idle_s) == (7.0, 3.0)


def test_a_prompt_pays_more_than_the_answers_beside_it() -> None:
    engine = EngineShare(0.0)
    answer = engine.enter(0.0, decode_weight(9, 4096, 400_000))
    prompt = engine.enter(0.0, 1.0)
    assert engine.change(1.0, prompt, 0) == pytest.approx(0.9)
    assert engine.change(1.0, answer, 0) == pytest.approx(0.1)


def test_a_request_that_holds_half_of_the_kv_cache_pays_for_it() -> None:
    assert decode_weight(64, 200_000, 400_000) == 0.5
    assert decode_weight(64, 1_000, 400_000) == 1 / 64
    assert decode_weight(0, 0, 400_000) == 1.0


def test_a_weight_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        EngineShare(0.0).enter(0.0, 0.0)


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_the_shares_of_all_requests_add_up_to_the_busy_time(seed: int, requests: int) -> None:
    random = Random(seed)
    engine, now, active, paid = EngineShare(0.0), 0.0, list[RequestShare](), 0.0
    for _ in range(requests):
        now += random.expovariate(1)
        active.append(engine.enter(now, random.choice((1.0, 0.25, 1 / 16))))
        if random.random() < 0.5:
            now += random.random()
            engine.change(now, random.choice(active), random.choice((0.1, 1.0)))
        if random.random() < 0.6:
            now += random.random()
            paid += engine.change(now, active.pop(random.randrange(len(active))), 0)
    while active:
        now += 0.5
        paid += engine.change(now, active.pop(), 0)
    engine.advance(now + 1)
    assert paid == pytest.approx(engine.busy_s, rel=1e-9)
    assert engine.busy_s + engine.idle_s == pytest.approx(now + 1)


def test_half_the_time_busy_19_of_20_wait_at_most_2_3_services() -> None:
    # Mean wait 0.5 s / (2 x 0.5) = 0.5 s; 0.5 / 0.5 x ln(0.5 / 0.05) = 2.303 s.
    assert wait_quantile_s(0.5, 1.0, 95) == pytest.approx(2.3026, rel=1e-4)
    assert wait_quantile_s(0.5, 0.1, 95) == pytest.approx(0.23026, rel=1e-4)
    assert wait_quantile_s(0.04, 1.0, 95) == 0.0
    assert wait_quantile_s(1.0, 1.0, 95) == inf


@given(st.floats(0.01, 500), st.floats(0.01, 5), st.sampled_from([90.0, 95.0, 99.0]))
def test_replicas_keep_the_wait_and_few_fewer_do_not(
    load: float, wait_s: float, percentile: float
) -> None:
    count = replicas_for_wait(load, 1.0, percentile, wait_s)
    assert wait_quantile_s(load / count, 1.0, percentile) <= wait_s
    fewer = count - max(1, count // 16) - 1
    assert fewer < load or wait_quantile_s(load / fewer, 1.0, percentile) > wait_s


def test_a_wait_that_no_replica_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 0 s or more"):
        replicas_for_wait(1.0, 1.0, 95, -0.1)
    with pytest.raises(ValueError, match="no number of replicas"):
        replicas_for_wait(1.0, 1.0, 95, float("nan"))


@pytest.mark.parametrize(
    ("rows", "tp", "intensity"), [(1, 1, 0.9995), (1, 8, 0.9978), (256, 1, 227.6), (256, 8, 163.8)]
)
def test_tp_lowers_the_flops_per_byte_of_a_matrix(rows: int, tp: int, intensity: float) -> None:
    # (rows, 4096) x (4096, 4096 / tp), all in two bytes: the figures of a published exercise.
    assert matrix_intensity(rows, 4096, tp, 2.0) == pytest.approx(intensity, rel=0.001)
