"""Quotas: never more than a minute's worth and what a minute fills, and who comes back when told finds enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.quota import Limits, Quota

COMES = st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 5000)), min_size=1, max_size=60)


@given(st.integers(1, 200), st.integers(1, 20_000), COMES)
def test_what_is_let_in_is_a_minutes_worth_at_first_and_then_what_time_has_filled(
    requests: int, tokens: int, comes: list[tuple[float, int]]
) -> None:
    quota, now, count, total, largest = Quota(Limits(requests, tokens)), 1000.0, 0, 0, 0
    for gap_s, amount in comes:
        now += gap_s
        if quota.take(amount, now) is None:
            count, total, largest = count + 1, total + amount, max(largest, amount)
        filled = 1.0 + (now - 1000.0) / 60.0
        assert count <= requests * filled + 1e-6
        assert total <= tokens * filled + max(0, largest - tokens) + 1e-3


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.lists(st.integers(1, 2**24), min_size=1, max_size=30))
def test_who_comes_back_when_it_was_told_to_is_let_in(requests: int, tokens: int, amounts: list[int]) -> None:
    quota, now = Quota(Limits(requests, tokens)), 5.0
    for amount in amounts:
        refused = quota.take(amount, now)
        if refused is not None:
            assert refused.retry_after_s > 0.0
            assert refused.remaining >= 0
            now += refused.retry_after_s
            assert quota.take(amount, now) is None


@given(COMES)
def test_what_was_refused_elsewhere_or_taken_too_much_comes_back(comes: list[tuple[float, int]]) -> None:
    quota = Quota(Limits(10, 50_000))
    for _ in range(3):
        for _, amount in comes[:10]:
            assert quota.take(amount, 0.0) is None
            quota.correct(-amount // 2)
            quota.give_back(amount - -(-amount // 2))
    assert quota.take(1, 0.0) is None


def test_a_clock_that_goes_back_fills_nothing() -> None:
    quota = Quota(Limits(1))
    assert quota.take(1, 100.0) is None
    refused = quota.take(1, 40.0)
    assert refused is not None
    assert (refused.what, refused.limit, refused.remaining, refused.retry_after_s) == ("requests", 1, 0, 60.0)
