"""Leave: who may fetch an offer. Whoever shows the ticket written for it; without one, whom the offer names, or
anybody where the engine said that the name alone will do. Sans-IO.

Not here: what a ticket is (ticket.py), whether the offer is still to be had (source.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.ends import Reason
from kvtransfer.messages import Card
from kvtransfer.outlet import Offer, Ware
from kvtransfer.regions import Region
from kvtransfer.ticket import Refusal, Refused, Ticket, Used, check, digest_of, mint

_REASON = {
    Refusal.EXPIRED: Reason.TICKET_EXPIRED,
    Refusal.WRONG_EPOCH: Reason.TICKET_EXPIRED,
    Refusal.SPENT: Reason.TICKET_SPENT,
}


def by_name(ware: Ware, agent: str) -> bool:
    """Whether this agent may have it without a ticket."""
    return ware.public if ware.sink is None else ware.sink == agent


class Leave:
    """Writes and reads the tickets of one agent; `key` is the fleet's. Owned by the SourceBook."""

    def __init__(self, key: bytes, card: Card, regions: Sequence[Region]) -> None:
        self._key, self._card, self._regions = key, card, regions
        self._used = Used()

    def write(self, offer: Offer) -> str:
        """A ticket for the offer, good until its lease runs out. ValueError for names that are too long."""
        ware = offer.ware
        ticket = Ticket(
            offer=ware.name,
            agent=self._card.agent,
            epoch=self._card.epoch,
            digest=digest_of(ware.blocks, np.concatenate(offer.generations)),
            not_after=offer.lease.deadline,
            nonce=offer.nonces[-1],
            sink=ware.sink,
        )
        return mint(self._key, ticket)

    def read(
        self, text: str, offer: Offer | None, name: str, sink: str, now: float
    ) -> Ticket | Reason:
        """The ticket, not yet spent: only a claim does that. Or why it is not honoured: what has a ticket and no offer
        has had its time."""
        try:
            ticket = check(self._key, text, now, epoch=self._card.epoch, sink=sink)
            if ticket.offer != name:
                return Reason.BAD_TICKET
            self._used.look(ticket, now)
            if offer is None or ticket.nonce not in offer.nonces:
                return Reason.GONE
            if ticket.digest != self._digest_now(offer):
                return Reason.STALE
        except Refused as refused:
            return _REASON.get(refused.reason, Reason.BAD_TICKET)
        return ticket

    def spend(self, ticket: Ticket, now: float) -> Reason | None:
        """It has served. Or why it cannot."""
        try:
            self._used.spend(ticket, now)
        except Refused as refused:
            return _REASON.get(refused.reason, Reason.BAD_TICKET)
        return None

    def _digest_now(self, offer: Offer) -> bytes:
        """Of the offer's blocks as they are now: not what its tickets say if one has changed hands meanwhile."""
        return digest_of(
            offer.ware.blocks,
            np.concatenate([each.generations_of(offer.ware.blocks) for each in self._regions]),
        )
