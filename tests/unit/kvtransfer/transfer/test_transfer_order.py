"""Tests of which KV transfer is sent next, by priority, deadline and wait."""

from __future__ import annotations

from kvtransfer.transfer.transfer_order import Priority, TransferOrder


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
