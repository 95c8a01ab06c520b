"""Tests of the retry budget, which limits retries to a share of the requests."""

from __future__ import annotations

import pytest

from policies.health.retry_budget import RetryBudget, RetryLimits


def taken(budget: RetryBudget, active: int) -> int:
    return sum(budget.try_take(active) for _ in range(1000))


def test_a_fifth_of_the_active_requests_and_three_more_may_be_retries() -> None:
    assert taken(RetryBudget(RetryLimits()), 100) == 23


def test_a_quiet_fleet_may_still_retry() -> None:
    assert taken(RetryBudget(RetryLimits()), 0) == 3


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = RetryBudget(RetryLimits(share=0.0, floor=1))
    assert budget.try_take(10)
    assert not budget.try_take(10)
    budget.release()
    assert budget.try_take(10)


def test_giving_back_more_than_was_taken_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="no retry is running"):
        RetryBudget(RetryLimits()).release()
