"""Tests of dividing an engine's cost among requests and idle time, without loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.cost_meter import CostMeter, EngineUse, divide_usd

PRICES = st.floats(0.1, 100)
WEIGHTS = st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 50), max_size=3)


def test_a_prompt_pays_four_times_what_a_quarter_of_the_batch_pays() -> None:
    shares, idle = divide_usd(EngineUse(2.5, 4, {"prompt": 1.0, "answer": 0.25}), 3600.0)
    assert (shares, idle) == ({"prompt": 8.0, "answer": 2.0}, 0.0)


def test_an_engine_without_requests_is_idle_and_two_gateways_share_that() -> None:
    assert divide_usd(EngineUse(2.5, 4, {}, gateways=2), 3600.0) == ({}, 5.0)


def test_the_share_of_another_gateway_is_counted_there() -> None:
    shares, idle = divide_usd(EngineUse(2.5, 4, {"a": 1.0}, others=3.0, gateways=2), 3600.0)
    assert (shares, idle) == ({"a": 2.5}, 0.0)


@given(
    st.lists(
        st.tuples(st.floats(0.001, 100), st.lists(st.tuples(PRICES, st.integers(1, 64), WEIGHTS))),
        max_size=8,
    )
)
def test_all_parts_add_up_to_price_times_gpus_times_time(
    spans: list[tuple[float, list[tuple[float, int, dict[str, float]]]]],
) -> None:
    meter: CostMeter[str] = CostMeter(5.0)
    now, expected = 5.0, 0.0
    for seconds, engines in spans:
        now += seconds
        uses = [("pool", EngineUse(price, gpus, weights)) for price, gpus, weights in engines]
        expected += sum(price * gpus for price, gpus, _ in engines) * seconds / 3600
        meter.advance(now, uses)
    total = sum(meter.usd.values()) + sum(meter.idle_usd.values())
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(WEIGHTS, st.floats(0, 50), st.integers(1, 5))
def test_two_gateways_count_an_engine_once(
    own: dict[str, float], theirs: float, gateways: int
) -> None:
    one, idle = divide_usd(EngineUse(1.0, 1, own, theirs, gateways), 3600.0)
    weights = {"other": theirs} if theirs else {}
    two, other_idle = divide_usd(EngineUse(1.0, 1, weights, sum(own.values()), gateways), 3600.0)
    if own or theirs:
        assert sum(one.values()) + sum(two.values()) == pytest.approx(1.0)
    else:
        assert idle * gateways == other_idle * gateways == pytest.approx(1.0)


def test_time_that_does_not_pass_costs_nothing() -> None:
    meter: CostMeter[str] = CostMeter(5.0)
    meter.advance(5.0, [("pool", EngineUse(2.5, 4, {"a": 1.0}))])
    assert (meter.usd, meter.idle_usd) == ({}, {})
