"""Property tests of the price of a request's tokens at a provider, in dollars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing_types import TokenPrice

DOLLARS = st.floats(0, 1000)
TOKENS = st.integers(0, 1_000_000)


@given(DOLLARS, DOLLARS, DOLLARS, TOKENS, TOKENS, TOKENS)
def test_a_request_costs_the_sum_of_its_kinds_of_tokens(
    prompt: float, cached: float, answer: float, new: int, hits: int, generated: int
) -> None:
    price = TokenPrice(prompt, cached, answer)
    expected = (new * prompt + hits * cached + generated * answer) / 1e6
    assert price.usd(new + hits, hits, generated) == pytest.approx(expected)


@given(DOLLARS, TOKENS, TOKENS)
def test_more_cached_than_prompt_tokens_never_cost_less_than_nothing(
    prompt: float, tokens: int, more: int
) -> None:
    assert TokenPrice(prompt, 0.0, 0.0).usd(tokens, tokens + more, 0) == 0.0
