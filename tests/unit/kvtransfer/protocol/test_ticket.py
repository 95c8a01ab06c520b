"""Tests of tickets (permissions to fetch KV): their content, and refusal of invalid ones."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.protocol.spent_tickets import SpentTickets
from kvtransfer.protocol.ticket import (
    MAX_CHARS,
    Ticket,
    TicketRefusal,
    TicketRefused,
    block_digest,
    check,
    mint,
)

KEY, EPOCH = b"k" * 32, b"e" * 16
BLOCKS, GENERATIONS = np.array([5, 3, 8]), np.array([1, 1, 4], np.uint32)
TICKET = Ticket(
    offer="req-1",
    agent="prefill-0",
    epoch=EPOCH,
    digest=block_digest(BLOCKS, GENERATIONS),
    not_after=130.0,
    nonce=b"n" * 16,
)


def refusal(
    text: str, now: float = 100.0, *, key: bytes = KEY, epoch: bytes = EPOCH, sink: str = "d"
) -> TicketRefusal:
    with pytest.raises(TicketRefused) as caught:
        check(key, text, now, epoch=epoch, sink=sink)
    assert text not in str(caught.value) or not text
    return caught.value.reason


def test_a_minted_ticket_is_ascii_and_decodes_to_the_same() -> None:
    text = mint(KEY, TICKET)
    assert check(KEY, text, 100.0, epoch=EPOCH) == TICKET
    assert text.isascii()
    assert all(character.isalnum() or character in "-_" for character in text)
    assert len(text) < 200


def test_a_ticket_for_one_sink_is_refused_to_others() -> None:
    text = mint(KEY, replace(TICKET, sink="decode-1"))
    assert check(KEY, text, 100.0, epoch=EPOCH, sink="decode-1").sink == "decode-1"
    assert refusal(text, sink="decode-2") is TicketRefusal.WRONG_SINK


def test_a_ticket_ends_on_the_second() -> None:
    text = mint(KEY, TICKET)
    check(KEY, text, 129.999, epoch=EPOCH)
    assert refusal(text, 130.0) is TicketRefusal.EXPIRED
    assert refusal(mint(KEY, replace(TICKET, not_after=float("nan")))) is TicketRefusal.EXPIRED


def test_a_ticket_of_an_earlier_epoch_or_another_agent_is_refused() -> None:
    assert refusal(mint(KEY, TICKET), epoch=b"f" * 16) is TicketRefusal.WRONG_EPOCH
    assert refusal(mint(KEY, TICKET), key=b"K" * 32) is TicketRefusal.FORGED


def test_no_bit_of_a_ticket_can_be_changed() -> None:
    data = base64.urlsafe_b64decode(mint(KEY, TICKET) + "==")
    for index in range(len(data)):
        for bit in range(8):
            forged = bytearray(data)
            forged[index] ^= 1 << bit
            assert (
                refusal(base64.urlsafe_b64encode(forged).rstrip(b"=").decode())
                is TicketRefusal.FORGED
            )


@pytest.mark.parametrize(
    "text",
    ["", "A" * 43, "A" * (MAX_CHARS + 1), "A" * 200 + "=", "A" * 200 + "\n", "é" * 200, "A" * 101],
)
def test_text_that_is_no_ticket_is_refused_before_it_is_read(text: str) -> None:
    assert refusal(text) in (TicketRefusal.MALFORMED, TicketRefusal.FORGED)


@pytest.mark.parametrize("offer", ["r", "rr", "rrr"])
def test_a_ticket_has_one_spelling(offer: str) -> None:
    text = mint(KEY, replace(TICKET, offer=offer))
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for last in alphabet.replace(text[-1], ""):
        assert refusal(text[:-1] + last) in (TicketRefusal.MALFORMED, TicketRefusal.FORGED)
    assert refusal(text + "=" * (-len(text) % 4 or 1)) is TicketRefusal.MALFORMED


def test_genuine_but_of_another_shape_is_refused() -> None:
    strange = replace(TICKET, offer="")
    assert refusal(mint(KEY, strange)) is TicketRefusal.MALFORMED


def test_names_that_are_too_long_are_not_minted_and_weak_keys_not_used() -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        mint(KEY, replace(TICKET, offer="x" * 1000))
    with pytest.raises(ValueError, match="at least 16 bytes"):
        mint(b"short", TICKET)


def test_a_digest_depends_on_blocks_their_order_and_their_generations() -> None:
    observations = {
        TICKET.digest,
        block_digest(BLOCKS[::-1], GENERATIONS),
        block_digest(BLOCKS, GENERATIONS + np.uint32(1)),
        block_digest(BLOCKS[:2], GENERATIONS[:2]),
    }
    assert len(observations) == 4
    assert (
        block_digest(BLOCKS.copy(), GENERATIONS.astype(np.uint64).astype(np.uint32))
        == TICKET.digest
    )


def test_a_ticket_is_valid_once() -> None:
    used = SpentTickets()
    used.spend(TICKET, 100.0)
    with pytest.raises(TicketRefused) as caught:
        used.spend(TICKET, 129.0)
    assert caught.value.reason is TicketRefusal.SPENT


def test_spent_tickets_are_forgotten_when_they_would_have_expired_anyway() -> None:
    used = SpentTickets(most=2)
    used.spend(TICKET, 100.0)
    used.spend(replace(TICKET, nonce=b"m" * 16, not_after=140.0), 100.0)
    third = replace(TICKET, nonce=b"o" * 16, not_after=150.0)
    with pytest.raises(TicketRefused) as caught:
        used.spend(third, 129.9)
    assert caught.value.reason is TicketRefusal.TOO_MANY
    used.spend(third, 130.0)
    assert len(used) == 2
