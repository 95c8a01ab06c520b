"""Invitations that wait for their offers: one per name, for a bounded time."""

from __future__ import annotations

from typing import Any

from kvtransfer.protocol.messages import Invite
from kvtransfer.protocol.outcomes import Reason
from kvtransfer.transfer.pending_invites import Guests
from kvtransfer.util.options import Options

LINK: Any = object()
OTHER: Any = object()


def asks(transfer: int, name: str, wait_s: float = 5.0) -> Invite:
    return Invite(transfer, name, b"", 1, 0, wait_s, wait_s, 0, 1)


def test_a_new_invitation_does_not_expire_with_an_earlier_one_of_its_name() -> None:
    guests = Guests(Options())
    assert guests.seat(LINK, asks(1, "r"), 0.0) is None
    assert guests.give_up(LINK, 1, None, 1.0)
    assert guests.seat(LINK, asks(2, "r"), 2.0) is None
    assert (guests.due(), guests.overdue(5.0)) == (5.0, [])
    assert (guests.due(), guests.overdue(7.0)) == (7.0, ["r"])
    assert guests.due() is None


def test_waiting_invitations_are_limited_in_total_and_one_per_name() -> None:
    guests = Guests(Options(most_waiting=2))
    assert guests.seat(LINK, asks(1, "a"), 0.0) is None
    assert guests.seat(OTHER, asks(1, "a"), 0.0) is Reason.NAME_TAKEN
    assert guests.seat(OTHER, asks(2, "b"), 0.0) is None
    assert guests.seat(OTHER, asks(3, "c"), 0.0) is Reason.TOO_MANY_WAITING
    guests.lost(OTHER)
    assert list(guests) == ["a"]
    assert not guests.give_up(OTHER, 2, "d", 0.0)
    assert guests.seat(OTHER, asks(3, "c"), 0.0) is None


def test_a_withdrawal_is_reported_once_and_an_end_for_a_while() -> None:
    guests = Guests(Options(memory_s=30.0))
    guests.seat(LINK, asks(1, "r"), 0.0)
    guests.give_up(LINK, 1, "d", 1.0)
    guests.ended("r", Reason.DECLINED, 2.0)
    assert guests.seat(LINK, asks(2, "r"), 31.0) is Reason.DECLINED
    assert guests.offered("r", 30.0) == (None, "d")
    assert guests.offered("r", 30.0) == (None, None)
    assert guests.seat(LINK, asks(3, "r"), 31.0) is None
