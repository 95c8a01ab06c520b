"""The source's book, by example: what an offer's own word forbids, whichever of the two came first."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.commands import Command, Send
from kvtransfer.ends import Reason
from kvtransfer.layout import KvDtype, KvLayout
from kvtransfer.messages import MOST_BLOCKS, Card, Invite, ProtocolError, Stop, pack_blocks
from kvtransfer.options import Options
from kvtransfer.outlet import Ware
from kvtransfer.regions import Region
from kvtransfer.source import SourceBook
from kvtransfer.tally import Tally
from kvtransfer.ticket import check

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4)


class FakeLink:
    transport, peer, received_bytes, window_bytes = "fake", "d", 0, 200


def book_and_link(agent: str) -> tuple[SourceBook, FakeLink]:
    size = LAYOUT.rank_block_bytes(0)
    region = Region.over(bytearray(16 * size), size, name="p")
    book, link = SourceBook(Card("p", b"p" * 16, LAYOUT), [region], b"k" * 32, Options(), Tally()), FakeLink()
    book.linked(link, Card(agent, b"d" * 16, LAYOUT), 1 << 20)  # type: ignore[arg-type]
    return book, link


def invite(transfer: int, ticket: str | None = None, tokens: int = 4) -> Invite:
    return Invite(transfer, "r", pack_blocks([3, 4]), tokens, 0, 9.0, 9.0, 0, 200, ticket)


def refusals(commands: list[Command]) -> list[Reason]:
    return [each.message.reason for each in commands if isinstance(each, Send) and isinstance(each.message, Stop)]


def test_an_offer_for_one_sink_is_not_given_to_another_that_waited_for_its_name() -> None:
    book, link = book_and_link("somebody")
    assert book.invited(link, invite(1), 0.0) == []  # type: ignore[arg-type]
    _, commands = book.offer(7, Ware("r", np.array([1]), 4, 30.0, 4, bytes(16), "d1"), 0.0)
    assert commands == [Send(link, Stop(1, Reason.BAD_TICKET))]  # type: ignore[arg-type]
    assert book.held["offered"] == 1
    assert book.held["waiting_invitations"] == 0


@pytest.mark.parametrize("reason", [Reason.LANDED, Reason.LEASE_EXPIRED])
def test_a_sink_cannot_say_of_a_lease_what_is_its_sources_to_say(reason: Reason) -> None:
    book, link = book_and_link("d1")
    book.offer(7, Ware("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    book.invited(link, invite(1), 0.0)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        book.stopped(link, Stop(1, reason), 0.1)  # type: ignore[arg-type]
    assert book.held["moving"] == 1


def test_a_ticket_that_was_refused_for_what_was_asked_is_not_spent() -> None:
    book, link = book_and_link("d1")
    ticket, _ = book.offer(7, Ware("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    assert refusals(book.invited(link, invite(1, ticket, tokens=8), 0.1)) == [Reason.TOKENS]  # type: ignore[arg-type]
    assert refusals(book.invited(link, invite(2, ticket), 0.2)) == []  # type: ignore[arg-type]
    assert book.held["moving"] == 1
    assert refusals(book.invited(link, invite(3, ticket), 0.3)) == [Reason.TICKET_SPENT]  # type: ignore[arg-type]


def test_a_renewed_ticket_is_another_one_and_does_not_end_the_one_on_its_way() -> None:
    book, link = book_and_link("d1")
    first, _ = book.offer(7, Ware("r", np.array([1]), 4, 30.0, 4, bytes(16)), 0.0)
    second = book.renew(7, 60.0, 0.1)
    assert second is not None
    nonces = {check(b"k" * 32, text, 0.2, epoch=b"p" * 16).nonce for text in (first, second)}
    assert len(nonces) == 2
    assert refusals(book.invited(link, invite(1, first), 0.2)) == []  # type: ignore[arg-type]
    assert refusals(book.invited(link, invite(2, first), 0.3)) == [Reason.TICKET_SPENT]  # type: ignore[arg-type]
    assert refusals(book.invited(link, invite(3, second), 0.3)) == [Reason.NAME_TAKEN]  # type: ignore[arg-type]


def test_no_more_blocks_are_offered_than_a_message_can_name() -> None:
    book, _ = book_and_link("d1")
    ware = Ware("r", np.zeros(MOST_BLOCKS + 1, np.int64), 4, 30.0, 4, bytes(16))
    with pytest.raises(ValueError, match="at most"):
        book.offer(7, ware, 0.0)
