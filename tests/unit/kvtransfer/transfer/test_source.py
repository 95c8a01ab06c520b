"""Tests by example of TransferSource, which decides what happens to offered KV."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.agent_messages import (
    MAX_BLOCKS,
    AgentCard,
    Invite,
    ProtocolError,
    StopTransfer,
    Unwanted,
    pack_blocks,
)
from kvtransfer.protocol.outcomes import RETRIABLE, EndReason
from kvtransfer.protocol.spent_tickets import SpentTickets
from kvtransfer.protocol.ticket import check, mint_ahead
from kvtransfer.transfer.commands import Command, ComputePlan, ResolveHandle, SendMessage
from kvtransfer.transfer.leased_offer import OfferSpec
from kvtransfer.transfer.pending_invites import TtlMap
from kvtransfer.transfer.source import TransferSource
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.util.agent_options import AgentOptions

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4)


class FakeLink:
    transport, peer, received_bytes, window_bytes, is_one_sided = "fake", "d", 0, 200, False


def book_and_link(agent: str) -> tuple[TransferSource, FakeLink]:
    size = LAYOUT.rank_block_bytes(0)
    region = Region.over(bytearray(16 * size), size, name="p")
    book, link = (
        TransferSource(
            AgentCard("p", b"p" * 16, LAYOUT), [region], b"k" * 32, AgentOptions(), AgentStats()
        ),
        FakeLink(),
    )
    book.on_linked(link, AgentCard(agent, b"d" * 16, LAYOUT), 1 << 20)  # type: ignore[arg-type]
    return book, link


def invite(transfer: int, ticket: str | None = None, tokens: int = 4) -> Invite:
    return Invite(transfer, "r", pack_blocks([3, 4]), tokens, 0, 9.0, 9.0, 0, 200, ticket)


def refusals(commands: list[Command]) -> list[EndReason]:
    return [
        command.message.reason
        for command in commands
        if isinstance(command, SendMessage) and isinstance(command.message, StopTransfer)
    ]


def test_an_offer_for_one_sink_is_refused_to_another_that_waited_for_its_name() -> None:
    book, link = book_and_link("somebody")
    assert book.on_invite(link, invite(1), 0.0) == []  # type: ignore[arg-type]
    _, commands = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), "d1"), 0.0)
    assert commands == [SendMessage(link, StopTransfer(1, EndReason.BAD_TICKET))]  # type: ignore[arg-type]
    assert book.counts["offered"] == 1
    assert book.counts["waiting_invitations"] == 0


def test_an_offer_needs_a_ticket_unless_it_is_public_or_made_for_the_sink() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    assert refusals(book.on_invite(link, invite(1), 0.1)) == [EndReason.BAD_TICKET]  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(2, ticket), 0.2)) == []  # type: ignore[arg-type]
    for sink, public in (("d1", False), (None, True)):
        book, link = book_and_link("d1")
        book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), sink, public), 0.0)
        assert refusals(book.on_invite(link, invite(1), 0.1)) == []  # type: ignore[arg-type]


def test_an_unauthorised_waiting_sink_does_not_block_an_authorised_one() -> None:
    book, link = book_and_link("somebody")
    book.on_invite(link, invite(1), 0.0)  # type: ignore[arg-type]
    ticket, commands = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.1)
    assert refusals(commands) == [EndReason.BAD_TICKET]
    book.on_stop(link, StopTransfer(1, EndReason.CANCELLED), 0.2)  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(2, ticket), 0.3)) == []  # type: ignore[arg-type]


def test_an_offer_is_taken_while_its_plan_is_computed_and_can_end_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.transfer.commands._MAX_INLINE_BLOCKS", 0)
    for end in ("nothing", "revoke", "stop", "lose", "expire"):
        book, link = book_and_link("d1")
        ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 1.0, 4, bytes(16)), 0.0)
        (long,) = book.on_invite(link, invite(1, ticket), 0.1)  # type: ignore[arg-type]
        assert isinstance(long, ComputePlan)
        assert refusals(book.on_invite(link, invite(2, ticket), 0.2)) == [EndReason.NAME_TAKEN]  # type: ignore[arg-type]
        then = long.work()
        if end == "revoke":
            assert refusals(book.revoke(7, EndReason.REVOKED, "", 0.3)) == [EndReason.REVOKED]
        elif end == "stop":
            book.on_stop(link, StopTransfer(1, EndReason.CANCELLED), 0.3)  # type: ignore[arg-type]
        elif end == "lose":
            book.on_lost(link, EndReason.LINK_LOST, "", 0.3)  # type: ignore[arg-type]
        due = then(0.4 if end != "expire" else 1.5)
        if end == "expire":
            assert refusals(due) == [EndReason.LEASE_EXPIRED]
        elif end != "nothing":
            assert due == []
        assert book.counts["moving"] == (end == "nothing")
        assert book.counts["offered"] == book.counts["claimed"] == 0


def test_a_plan_between_very_many_ranks_is_long_however_few_its_blocks() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 1.0, 4, bytes(16)), 0.0)
    many = FakeLink()
    book.on_linked(many, AgentCard("d2", b"e" * 16, replace(LAYOUT, tp=512, pp=4)), 1 << 20)  # type: ignore[arg-type]
    (long,) = book.on_invite(many, invite(1, ticket), 0.1)  # type: ignore[arg-type]
    assert isinstance(long, ComputePlan)
    assert refusals(book.on_invite(link, invite(1, ticket), 0.2)) == [EndReason.NAME_TAKEN]  # type: ignore[arg-type]
    assert not refusals(long.work()(0.3))
    assert book.counts["moving"] == 1


@pytest.mark.parametrize("reason", [EndReason.LANDED, EndReason.LEASE_EXPIRED])
def test_a_sink_cannot_send_the_sources_reasons_for_an_end(reason: EndReason) -> None:
    book, link = book_and_link("d1")
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.0)
    book.on_invite(link, invite(1), 0.0)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        book.on_stop(link, StopTransfer(1, reason), 0.1)  # type: ignore[arg-type]
    assert book.counts["moving"] == 1


def test_a_ticket_of_a_refused_invitation_is_not_spent() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    assert refusals(book.on_invite(link, invite(1, ticket, tokens=8), 0.1)) == [EndReason.TOKENS]  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(2, ticket), 0.2)) == []  # type: ignore[arg-type]
    assert book.counts["moving"] == 1
    assert refusals(book.on_invite(link, invite(3, ticket), 0.3)) == [EndReason.TICKET_SPENT]  # type: ignore[arg-type]


def test_a_source_that_remembers_too_many_spent_tickets_says_so() -> None:
    book, link = book_and_link("d1")
    book._authorizer._used = SpentTickets(most=0)
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    ends = refusals(book.on_invite(link, invite(1, ticket), 0.1))  # type: ignore[arg-type]
    assert ends == [EndReason.TOO_MANY_SPENT]
    assert EndReason.TOO_MANY_SPENT in RETRIABLE


def ahead(nonce: bytes = b"n" * 16, epoch: bytes | None = None, not_after: float = 30.0) -> str:
    return mint_ahead(b"k" * 32, "r", "p", epoch or b"p" * 16, nonce, not_after)


def test_a_ticket_minted_ahead_fetches_the_offer_with_its_nonce_once() -> None:
    book, link = book_and_link("d1")
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, b"n" * 16), 0.0)
    other = ahead(nonce=b"x" * 16)
    assert refusals(book.on_invite(link, invite(1, other), 0.1)) == [EndReason.GONE]  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(2, ahead()), 0.1)) == []  # type: ignore[arg-type]
    assert book.counts["moving"] == 1
    assert refusals(book.on_invite(link, invite(3, ahead()), 0.2)) == [EndReason.TICKET_SPENT]  # type: ignore[arg-type]


def test_an_invitation_with_a_ticket_minted_ahead_waits_for_its_offer() -> None:
    book, link = book_and_link("d1")
    assert book.on_invite(link, invite(1, ahead()), 0.0) == []  # type: ignore[arg-type]
    assert book.counts["waiting_invitations"] == 1
    _, commands = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, b"n" * 16), 0.1)
    assert refusals(commands) == []
    assert book.counts["moving"] == 1


def test_a_waiting_invitation_is_refused_if_its_offer_has_another_nonce_or_came_too_late() -> None:
    for nonce, now, reason in (
        (b"x" * 16, 0.1, EndReason.GONE),
        (b"n" * 16, 40.0, EndReason.TICKET_EXPIRED),
    ):
        book, link = book_and_link("d1")
        book.on_invite(link, invite(1, ahead()), 0.0)  # type: ignore[arg-type]
        _, commands = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, nonce), now)
        assert refusals(commands) == [reason]
        assert book.counts["offered"] == 1


def test_a_ticket_minted_ahead_for_an_earlier_start_or_an_ended_offer_is_refused() -> None:
    book, link = book_and_link("d1")
    early = ahead(epoch=b"o" * 16)
    assert refusals(book.on_invite(link, invite(1, early), 0.0)) == [EndReason.TICKET_EXPIRED]  # type: ignore[arg-type]
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, b"n" * 16), 0.1)
    book.revoke(7, EndReason.REVOKED, "", 0.2)
    assert refusals(book.on_invite(link, invite(2, ahead()), 0.3)) == [EndReason.GONE]  # type: ignore[arg-type]


def test_a_renewed_ticket_leaves_earlier_tickets_valid() -> None:
    book, link = book_and_link("d1")
    first, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    second = book.renew(7, 60.0, 0.1)
    assert second is not None
    nonces = {check(b"k" * 32, text, 0.2, epoch=b"p" * 16).nonce for text in (first, second)}
    assert len(nonces) == 2
    assert refusals(book.on_invite(link, invite(1, first), 0.2)) == []  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(2, first), 0.3)) == [EndReason.TICKET_SPENT]  # type: ignore[arg-type]
    assert refusals(book.on_invite(link, invite(3, second), 0.3)) == [EndReason.NAME_TAKEN]  # type: ignore[arg-type]


def test_no_more_blocks_are_offered_than_a_message_can_name() -> None:
    book, _ = book_and_link("d1")
    ware = OfferSpec("r", np.zeros(MAX_BLOCKS + 1, np.int64), 4, 30.0, 4, bytes(16))
    with pytest.raises(ValueError, match="at most"):
        book.offer(7, ware, 0.0)


@pytest.mark.parametrize("way", ["declined", "revoked", "expired"])
def test_an_invitation_for_an_ended_name_is_refused_at_once(way: str) -> None:
    book, link = book_and_link("d1")
    if way == "declined":
        book.decline("r", "", 1.0)
    else:
        book.offer(7, OfferSpec("r", np.array([1]), 4, 0.5, 4, bytes(16), public=True), 0.5)
        if way == "revoked":
            book.revoke(7, EndReason.REVOKED, "", 1.0)
        book.tick(1.0)
    reason = EndReason.DECLINED if way == "declined" else EndReason.GONE
    assert refusals(book.on_invite(link, invite(1), 20.0)) == [reason]  # type: ignore[arg-type]
    assert book.on_invite(link, invite(2), 31.0) == []  # type: ignore[arg-type]
    assert book.counts["waiting_invitations"] == 1, "some time later the name is like any other"


def test_a_name_that_is_on_offer_again_is_not_refused_for_what_was() -> None:
    book, link = book_and_link("d1")
    book.decline("r", "", 0.0)
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.1)
    assert refusals(book.on_invite(link, invite(1), 0.2)) == []  # type: ignore[arg-type]
    assert book.counts["moving"] == 1


@pytest.mark.parametrize(
    "reason", [EndReason.CANCELLED, EndReason.CORRUPT, EndReason.CLOSED, EndReason.REVOKED]
)
def test_an_invitation_for_an_ended_offer_is_refused(reason: EndReason) -> None:
    book, link = book_and_link("d1")
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.0)
    book.revoke(7, reason, "", 0.1)
    assert refusals(book.on_invite(link, invite(1), 0.2)) == [EndReason.GONE]  # type: ignore[arg-type]
    book.offer(8, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.3)
    assert refusals(book.on_invite(link, invite(2), 0.4)) == []  # type: ignore[arg-type]


def test_an_offer_that_its_sink_has_given_up_waiting_for_ends_at_once() -> None:
    book, link = book_and_link("d1")
    book.on_invite(link, invite(1), 0.0)  # type: ignore[arg-type]
    book.on_stop(link, StopTransfer(1, EndReason.CANCELLED), 0.1)  # type: ignore[arg-type]
    _, other = book.offer(6, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), "d2"), 0.2)
    assert other == [], "this one is for somebody else"
    book, link = book_and_link("d1")
    book.on_invite(link, invite(2), 0.3)  # type: ignore[arg-type]
    book.on_stop(link, StopTransfer(2, EndReason.CANCELLED), 0.4)  # type: ignore[arg-type]
    _, commands = book.offer(
        7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.5
    )
    assert [command.end.reason for command in commands if isinstance(command, ResolveHandle)] == [
        EndReason.CANCELLED
    ]
    assert not any(book.counts.values())
    assert (
        book.offer(8, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.6)[1]
        == []
    ), "it was the word on one offer"


@pytest.mark.parametrize("again", [True, False])
def test_an_offer_stays_for_a_sink_that_waits_again_or_timed_out(again: bool) -> None:
    book, link = book_and_link("d1")
    book.on_invite(link, invite(1), 0.0)  # type: ignore[arg-type]
    book.on_stop(link, StopTransfer(1, EndReason.CANCELLED if again else EndReason.TIMEOUT), 0.1)  # type: ignore[arg-type]
    if again:
        book.on_invite(link, invite(2), 0.2)  # type: ignore[arg-type]
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.3)
    assert book.counts["moving" if again else "offered"] == 1


def test_an_offer_that_its_sink_declines_ends_at_once() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    commands = book.on_unwanted(link, Unwanted("r", ticket), 0.1)  # type: ignore[arg-type]
    assert [command.end.reason for command in commands if isinstance(command, ResolveHandle)] == [
        EndReason.CANCELLED
    ]
    assert not any(book.counts.values())
    assert refusals(book.on_invite(link, invite(1, ticket), 0.2)) == [EndReason.GONE]  # type: ignore[arg-type]


def test_an_unauthorised_sink_cannot_end_an_offer() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), "d1"), 0.0)
    other, _ = book.offer(8, OfferSpec("other", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    for message in (
        Unwanted("r", other),
        Unwanted("other"),
        Unwanted("other", ticket),
        Unwanted("none", ticket),
    ):
        assert book.on_unwanted(link, message, 0.1) == []  # type: ignore[arg-type]
    assert book.counts["offered"] == 2
    book.on_invite(link, invite(1), 0.2)  # type: ignore[arg-type]
    assert book.on_unwanted(link, Unwanted("r"), 0.3) == [], "it was asked for"  # type: ignore[arg-type]
    assert book.counts["moving"] == 1


def test_an_offer_that_its_sink_declined_beforehand_ends_at_once() -> None:
    book, link = book_and_link("d1")
    book.on_unwanted(link, Unwanted("r"), 0.0)  # type: ignore[arg-type]
    _, commands = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), "d1"), 0.1)
    assert [command.end.reason for command in commands if isinstance(command, ResolveHandle)] == [
        EndReason.CANCELLED
    ]


def test_a_sink_that_declines_does_not_affect_a_waiting_one() -> None:
    book, link = book_and_link("d1")
    book.on_invite(link, invite(1), 0.0)  # type: ignore[arg-type]
    book.on_unwanted(link, Unwanted("r"), 0.1)  # type: ignore[arg-type]
    book.on_stop(link, StopTransfer(1, EndReason.TIMEOUT), 0.2)  # type: ignore[arg-type]
    book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16), public=True), 0.3)
    assert book.counts["offered"] == 1


def test_names_are_remembered_for_a_while_and_not_too_many() -> None:
    names: TtlMap[int] = TtlMap(10.0, max_entries=3)
    for index in range(5):
        names.put(f"n{index}", index, float(index))
    assert [names.get(f"n{index}", 4.0) for index in range(5)] == [None, None, 2, 3, 4]
    assert (names.pop("n3", 5.0), names.pop("n3", 5.0)) == (3, None)
    names.put("new", 5, 13.5)
    assert (len(names), names.get("n4", 13.9), names.get("n4", 14.0)) == (2, 4, None)


def test_ended_items_cause_no_wake_up() -> None:
    book, link = book_and_link("d1")
    assert book.on_invite(link, invite(1), 0.0) == []  # type: ignore[arg-type]
    book.offer(7, OfferSpec("other", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    assert book.next_deadline() == 9.0
    book.on_stop(link, StopTransfer(1, EndReason.CANCELLED), 1.0)  # type: ignore[arg-type]
    assert book.next_deadline() == 30.0
    book.revoke(7, EndReason.REVOKED, "", 1.0)
    assert book.next_deadline() is None


def test_a_ticket_for_blocks_with_a_new_owner_is_refused_before_a_byte_moves() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, OfferSpec("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    book._regions[0].bump([2])
    assert refusals(book.on_invite(link, invite(1, ticket, tokens=8), 0.1)) == [EndReason.TOKENS]  # type: ignore[arg-type]
    book._regions[0].bump([1])
    assert refusals(book.on_invite(link, invite(2, ticket), 0.2)) == [EndReason.STALE]  # type: ignore[arg-type]
    assert book.counts["offered"] == 1
