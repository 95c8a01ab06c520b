"""Decides whether an agent may fetch an offer of KV, by the offer's ticket or by its name.

An agent needs the offer's ticket, a signed permission, unless the offer names that agent or is
public. protocol/ticket.py has the format of tickets; source.py knows which offers exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.spent_tickets import SpentTickets
from kvtransfer.protocol.ticket import (
    AHEAD,
    Ticket,
    TicketRefusal,
    TicketRefused,
    block_digest,
    check,
    mint,
)
from kvtransfer.transfer.leased_offer import LeasedOffer, OfferSpec

_REASON = {
    TicketRefusal.EXPIRED: EndReason.TICKET_EXPIRED,
    TicketRefusal.WRONG_EPOCH: EndReason.TICKET_EXPIRED,
    TicketRefusal.SPENT: EndReason.TICKET_SPENT,
    TicketRefusal.TOO_MANY: EndReason.TOO_MANY_SPENT,
}


def may_fetch_by_name(spec: OfferSpec, agent: str) -> bool:
    """Return whether an agent may fetch an offer of KV although it has no ticket (permission).

    spec   the offer
    agent  the agent's name
    """
    return spec.public if spec.sink is None else spec.sink == agent


class Authorizer:
    """Issues tickets, which permit other agents to fetch an offer of KV, and checks those they
    present.

    The fleet's key signs the tickets.
    """

    def __init__(self, key: bytes, card: AgentCard, regions: Sequence[Region]) -> None:
        self._key, self._card, self._regions = key, card, regions
        self._used = SpentTickets()

    def issue(self, offer: LeasedOffer) -> str:
        """Return a new ticket, a text that permits to fetch this offer of KV until the offer's
        lease ends.

        Raises ValueError if the names in it make it too long.
        """
        spec = offer.spec
        ticket = Ticket(
            offer=spec.name,
            agent=self._card.agent,
            epoch=self._card.epoch,
            digest=block_digest(spec.blocks, np.concatenate(offer.generations)),
            not_after=offer.lease.deadline,
            nonce=offer.nonces[-1],
            sink=spec.sink,
        )
        return mint(self._key, ticket)

    def check(
        self, text: str, offer: LeasedOffer | None, name: str, sink: AgentCard, now: float
    ) -> Ticket | EndReason:
        """Check the ticket `text`, with which the agent `sink` asks to fetch the KV called `name`.

        Returns the decoded ticket, or the reason for refusing it: GONE if the offer no longer
        exists (None). A ticket may have been issued before its offer is made; it is then valid
        although the offer does not exist yet. The ticket is not marked as used.
        """
        try:
            ticket = check(self._key, text, now, epoch=self._card.epoch, sink=sink.agent)
            if ticket.offer != name:
                return EndReason.BAD_TICKET
            self._used.check_unspent(ticket, now, sink.rank)
            if offer is None and ticket.digest == AHEAD:
                return ticket
            if offer is None or ticket.nonce not in offer.nonces:
                return EndReason.GONE
            if ticket.digest not in (AHEAD, self._digest_now(offer)):
                return EndReason.STALE
        except TicketRefused as refused:
            return _REASON.get(refused.reason, EndReason.BAD_TICKET)
        return ticket

    def spend(self, ticket: Ticket, sink: AgentCard, now: float) -> EndReason | None:
        """Mark a ticket as used by one rank of the fetching engine, because it may be used only
        once.

        Returns None, or the reason why the ticket is refused.
        """
        try:
            self._used.spend(ticket, now, sink.rank)
        except TicketRefused as refused:
            return _REASON.get(refused.reason, EndReason.BAD_TICKET)
        return None

    def _digest_now(self, offer: LeasedOffer) -> bytes:
        # Return the hash of the offer's blocks with their current generations.
        #
        # The hash differs from the one in the ticket if a block has changed its owner since.
        return block_digest(
            offer.spec.blocks,
            np.concatenate([region.generations_of(offer.spec.blocks) for region in self._regions]),
        )
