"""Tests of the limit on KV that is sent to an agent before its arrival is reported."""

from __future__ import annotations

import pytest

from kvtransfer.transfer.send_credits import SendCredits


def test_bytes_in_flight_stay_within_the_budget() -> None:
    credits = SendCredits(100)
    assert credits.try_acquire(1, 60)
    assert credits.try_acquire(2, 40)
    assert not credits.try_acquire(1, 1)
    credits.put_back(2, 40)
    assert credits.try_acquire(1, 40)
    assert credits.in_flight_bytes == 100


def test_a_window_larger_than_the_budget_goes_alone() -> None:
    credits = SendCredits(100)
    assert credits.try_acquire(1, 500)
    assert not credits.try_acquire(1, 1)
    credits.put_back(1, 500)
    assert credits.try_acquire(1, 1)
    assert not credits.try_acquire(1, 500)


def test_a_transfer_that_ends_returns_its_credit() -> None:
    credits = SendCredits(100)
    credits.try_acquire(1, 30)
    credits.try_acquire(1, 30)
    credits.try_acquire(2, 40)
    assert (credits.forget(1), credits.forget(1), credits.in_flight_bytes) == (60, 0, 40)


@pytest.mark.parametrize("n_bytes", [31, -1])
def test_a_peer_cannot_give_back_what_it_was_not_sent(n_bytes: int) -> None:
    credits = SendCredits(100)
    credits.try_acquire(1, 30)
    with pytest.raises(ValueError, match="only 30 bytes were in flight"):
        credits.put_back(1, n_bytes)
    with pytest.raises(ValueError, match="only 0 bytes were in flight"):
        credits.put_back(2, 1)


def test_a_peer_that_takes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SendCredits(0)
