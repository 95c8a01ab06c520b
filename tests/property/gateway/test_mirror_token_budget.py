"""Property tests of a limit on tokens per minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.trials.mirror_token_budget import MINUTE_S, TokenBudget

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 60), st.floats(0, 1)), max_size=60)


@given(STEPS)
def test_no_minute_has_more_tokens_than_the_budget(
    steps: list[tuple[float, int, float]],
) -> None:
    budget, now_s, used = TokenBudget(100), 0.0, list[tuple[float, int]]()
    for pause_s, tokens, share in steps:
        now_s += pause_s
        spending = budget.try_take(tokens, now_s)
        if spending is not None:
            real = int(spending.tokens * share)
            budget.settle(spending, real)
            used.append((now_s, real))
        for end_s, _ in used:
            inside = [count for at_s, count in used if end_s - MINUTE_S < at_s <= end_s]
            assert sum(inside) <= 100


@given(STEPS)
def test_an_unused_part_can_be_taken_again_and_a_minute_later_all(
    steps: list[tuple[float, int, float]],
) -> None:
    budget, now_s = TokenBudget(100), 0.0
    for pause_s, tokens, _ in steps:
        now_s += pause_s
        budget.try_take(tokens, now_s)
    now_s += MINUTE_S + 1e-6
    spending = budget.try_take(100, now_s)
    assert spending is not None
    assert budget.try_take(1, now_s) is None
    budget.settle(spending, 40)
    assert budget.try_take(61, now_s) is None
    assert budget.try_take(60, now_s) is not None
