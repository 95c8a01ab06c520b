"""Tests of expected answer lengths: which average is used, few answers, limited memory."""

from __future__ import annotations

import pytest

from policies.engine.output_length import MOST_HELD, OutputLengths, RecentLengths


def test_nothing_is_expected_of_a_model_never_seen() -> None:
    lengths = OutputLengths()
    lengths.record("small", "a", "chat", 100)
    assert lengths.estimate("large", "a", "chat") is None


def test_a_new_tenant_is_expected_to_be_like_the_model() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.record("m", "a", "chat", 300)
    assert lengths.estimate("m", "newcomer", "batch") == 300


def test_a_tenants_classes_are_distinguished_after_a_few_answers() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.record("m", "a", "chat", 100)
        lengths.record("m", "a", "batch", 2000)
    assert lengths.estimate("m", "a", "chat") == pytest.approx(100)
    assert lengths.estimate("m", "a", "batch") == pytest.approx(2000)


def test_one_answer_of_a_tenant_moves_its_expectation_only_in_part() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.record("m", "a", "chat", 100)
    lengths.record("m", "b", "chat", 1100)
    result = lengths.estimate("m", "b", "chat")
    assert result is not None
    assert 110 < result < 600


def test_a_change_of_habit_is_followed() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        lengths.record("m", "a", "chat", 100)
    for _ in range(400):
        lengths.record("m", "a", "chat", 900)
    assert lengths.estimate("m", "a", "chat") == pytest.approx(900, rel=0.05)


def test_answers_recorded_together_count_like_single_ones() -> None:
    together, apart = OutputLengths(), OutputLengths()
    for tokens in ([100, 300], [500, 500, 200], [40]):
        together.record("m", "a", "chat", sum(tokens) / len(tokens), len(tokens))
        for token in tokens:
            apart.record("m", "a", "chat", token)
    assert together.estimate("m", "a", "chat") == pytest.approx(apart.estimate("m", "a", "chat"))


def test_the_clients_bound_is_never_exceeded() -> None:
    lengths = OutputLengths()
    lengths.record("m", "a", "chat", 500)
    assert lengths.estimate("m", "a", "chat", bound=64) == 64


def test_memory_is_bounded_and_the_least_recent_is_dropped_first() -> None:
    lengths = OutputLengths(most=30)
    for number in range(1000):
        lengths.record("m", f"tenant{number}", "chat", number)
    assert len(lengths) == 30
    assert lengths.estimate("m", "tenant999", "chat") is not None
    with pytest.raises(ValueError, match="at least 3"):
        OutputLengths(most=2)


def test_an_ended_answer_counts_once_all_that_began_before_it_have_ended() -> None:
    lengths = RecentLengths()
    before = list(lengths.quantiles())
    for number in range(100):
        lengths.begin(number)
    for number in range(1, 100):
        lengths.end(number, 10, 100)
    assert lengths.quantiles() == before
    lengths.end(0, 1000, 100)
    assert lengths.quantiles() == [0.1] * 5


def test_an_answer_that_ended_incomplete_holds_back_no_others_and_does_not_count() -> None:
    lengths = RecentLengths()
    before = list(lengths.quantiles())
    lengths.begin("first")
    lengths.begin("second")
    lengths.end("first", None, 100)
    assert lengths.quantiles() == before
    lengths.end("second", 1000, 100)
    assert max(lengths.quantiles()) == 10.0


def test_an_answer_that_runs_very_long_holds_back_others_for_a_time_only() -> None:
    lengths = RecentLengths()
    lengths.begin("long")
    for number in range(MOST_HELD):
        lengths.begin(number)
        lengths.end(number, 10, 100)
    assert lengths.quantiles() == [0.1] * 5
    for number in range(100):
        lengths.end(f"unknown {number}", 300, 100)
    lengths.end("long", 300, 100)
    assert max(lengths.quantiles()) == 3.0
