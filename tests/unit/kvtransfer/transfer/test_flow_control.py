"""Tests of the flow control of KV transfers: credits, order and bandwidth."""

from __future__ import annotations

import pytest

from kvtransfer.transfer.flow_control import BandwidthMeter, Priority, SendCredits, TransferOrder


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


def test_the_urgent_class_goes_first_and_in_it_the_earliest_deadline() -> None:
    turns = TransferOrder()
    turns.add(1, Priority.BULK, 1.0, 0.0)
    turns.add(2, Priority.INTERACTIVE, 9.0, 0.0)
    turns.add(3, Priority.INTERACTIVE, 8.0, 0.1)
    turns.add(4, Priority.INTERACTIVE, 8.0, 0.0)
    order = []
    while (first := turns.next(0.2)) is not None:
        order.append(first)
        turns.remove(first)
    assert order == [4, 3, 2, 1]
    assert len(turns) == 0


def test_a_waiting_transfer_becomes_more_urgent() -> None:
    turns = TransferOrder(promote_s=0.5)
    turns.add(1, Priority.MIGRATION, 1.0, 0.0)
    turns.add(2, Priority.INTERACTIVE, 5.0, 0.9)
    assert [turns.next(now) for now in (0.9, 0.99, 1.0)] == [2, 2, 1]


def test_asking_again_does_not_lose_the_place_in_line() -> None:
    turns = TransferOrder(promote_s=0.5)
    turns.add(1, Priority.BULK, 1.0, 0.0)
    turns.add(1, Priority.BULK, 1.0, 0.4)
    turns.add(2, Priority.INTERACTIVE, 5.0, 0.4)
    assert turns.next(0.5) == 1
    turns.remove(7)
    assert len(turns) == 2


def test_bandwidth_is_measured_per_peer_and_transport() -> None:
    bandwidth = BandwidthMeter(half_life_s=1.0)
    assert bandwidth.bytes_per_s("d0", "tcp") is None
    for _ in range(20):
        bandwidth.record("d0", "tcp", 1000, 1.0)
    bandwidth.record("d0", "shm", 7000, 1.0)
    assert bandwidth.all() == {
        ("d0", "tcp"): pytest.approx(1000),
        ("d0", "shm"): pytest.approx(7000),
    }
    bandwidth.record("d0", "tcp", 10_000, 10.0 / 3)
    rate = bandwidth.bytes_per_s("d0", "tcp")
    assert rate is not None
    assert 2500 < rate < 3000
    bandwidth.forget("d0")
    assert bandwidth.all() == {}


def test_a_short_transfer_hardly_moves_the_rate() -> None:
    bandwidth = BandwidthMeter()
    bandwidth.record("d0", "tcp", 1000, 1.0)
    bandwidth.record("d0", "tcp", 1, 0.01)
    bandwidth.record("d0", "tcp", 5, 0.0)
    assert bandwidth.bytes_per_s("d0", "tcp") == pytest.approx(1000, rel=0.02)
