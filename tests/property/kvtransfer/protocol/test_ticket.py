"""Property tests of tickets (permissions to fetch KV): only issued ones are accepted."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.spent_tickets import SpentTickets
from kvtransfer.protocol.ticket import Ticket, TicketRefused, check, mint

KEY, EPOCH = b"k" * 32, b"e" * 16
nonces = st.binary(min_size=16, max_size=16)
short_names = st.text(min_size=1, max_size=40)
tickets = st.builds(
    Ticket,
    offer=short_names,
    agent=short_names,
    epoch=st.just(EPOCH),
    digest=nonces,
    not_after=st.floats(1, 1e9),
    nonce=nonces,
    sink=st.none() | short_names,
)


@given(ticket=tickets)
def test_a_minted_ticket_decodes_to_the_same(ticket: Ticket) -> None:
    text = mint(KEY, ticket)
    assert text.isascii()
    assert check(KEY, text, 0.0, epoch=EPOCH, sink=ticket.sink) == ticket


@given(
    text=st.text(max_size=400)
    | st.text("ABCabc019-_", max_size=1100)
    | st.binary(max_size=300).map(lambda b: b.hex())
)
def test_no_other_text_is_accepted(text: str) -> None:
    with pytest.raises(TicketRefused):
        check(KEY, text, 0.0, epoch=EPOCH)


@given(ticket=tickets, at=st.integers(0, 2000), put=st.text(max_size=3))
def test_an_altered_ticket_is_refused(ticket: Ticket, at: int, put: str) -> None:
    text = mint(KEY, ticket)
    at %= len(text)
    touched = text[:at] + put + text[at + 1 :]
    if touched != text:
        with pytest.raises(TicketRefused):
            check(KEY, touched, 0.0, epoch=EPOCH, sink=ticket.sink)


@given(
    lifetimes=st.lists(st.integers(1, 30), max_size=30),
    presented=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 3)), max_size=120),
)
def test_each_ticket_is_valid_at_most_once_whatever_is_forgotten(
    lifetimes: list[int], presented: list[tuple[int, int]]
) -> None:
    used, served, now = SpentTickets(), [], 0.0
    minted = [
        mint(KEY, Ticket("o", "a", EPOCH, b"d" * 16, float(seconds), number.to_bytes(16)))
        for number, seconds in enumerate(lifetimes)
    ]
    for number, pause in presented:
        now += pause
        if number < len(minted):
            with contextlib.suppress(TicketRefused):
                used.spend(check(KEY, minted[number], now, epoch=EPOCH), now)
                served.append(number)
    assert len(served) == len(set(served))
    assert len(used) <= len(served)
