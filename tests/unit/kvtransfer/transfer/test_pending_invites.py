"""Tests of requests for KV that is not offered yet: one waits per name, for a limited time."""

from __future__ import annotations

from typing import Any

from kvtransfer.protocol.agent_messages import Invite
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transfer.pending_invites import PendingInvites
from kvtransfer.util.agent_options import AgentOptions

LINK: Any = object()
OTHER: Any = object()


def asks(transfer: int, name: str, wait_s: float = 5.0) -> Invite:
    return Invite(transfer, name, b"", 1, 0, wait_s, wait_s, 0, 1)


def test_a_new_invitation_does_not_expire_with_an_earlier_one_of_its_name() -> None:
    guests = PendingInvites(AgentOptions())
    assert guests.add(LINK, asks(1, "r"), -1, 0.0) is None
    assert guests.withdraw(LINK, 1, None, 1.0)
    assert guests.add(LINK, asks(2, "r"), -1, 2.0) is None
    assert (guests.next_deadline(), guests.take_expired(5.0)) == (5.0, [])
    assert guests.next_deadline() == 7.0
    assert [pending.invite.transfer for pending in guests.take_expired(7.0)] == [2]
    assert guests.next_deadline() is None


def test_waiting_invitations_are_limited_in_total_and_one_per_name() -> None:
    guests = PendingInvites(AgentOptions(max_waiting_invites=2))
    assert guests.add(LINK, asks(1, "a"), -1, 0.0) is None
    assert guests.add(OTHER, asks(1, "a"), -1, 0.0) is EndReason.NAME_TAKEN
    assert guests.add(OTHER, asks(2, "b"), -1, 0.0) is None
    assert guests.add(OTHER, asks(3, "c"), -1, 0.0) is EndReason.TOO_MANY_WAITING
    guests.remove_link(OTHER)
    assert list(guests) == ["a"]
    assert not guests.withdraw(OTHER, 2, "d", 0.0)
    assert guests.add(OTHER, asks(3, "c"), -1, 0.0) is None


def test_a_withdrawal_is_reported_once_and_an_end_for_a_while() -> None:
    guests = PendingInvites(AgentOptions(name_memory_s=30.0))
    guests.add(LINK, asks(1, "r"), -1, 0.0)
    guests.withdraw(LINK, 1, "d", 1.0)
    guests.mark_ended("r", EndReason.DECLINED, 2.0)
    assert guests.add(LINK, asks(2, "r"), -1, 31.0) is EndReason.DECLINED
    assert guests.take_for_offer("r", 30.0) == ([], "d")
    assert guests.take_for_offer("r", 30.0) == ([], None)
    assert guests.add(LINK, asks(3, "r"), -1, 31.0) is None


def test_the_ranks_of_a_group_wait_for_one_name_and_end_by_themselves() -> None:
    guests = PendingInvites(AgentOptions())
    assert guests.add(LINK, asks(1, "r"), 0, 0.0) is None
    assert guests.add(OTHER, asks(1, "r", wait_s=9.0), 1, 0.0) is None
    assert guests.add(OTHER, asks(2, "r"), 1, 0.0) is EndReason.NAME_TAKEN
    assert guests.add(OTHER, asks(3, "r"), -1, 0.0) is EndReason.NAME_TAKEN
    assert len(guests) == 2
    assert [pending.rank for pending in guests.take_expired(5.0)] == [0]
    assert [pending.rank for pending in guests.take_for_offer("r", 6.0)[0]] == [1]
    assert len(guests) == 0
    assert guests.add(LINK, asks(4, "r"), -1, 7.0) is None
    assert guests.add(OTHER, asks(5, "r"), 0, 7.0) is EndReason.NAME_TAKEN
