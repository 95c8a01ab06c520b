"""Authorizer: who may fetch an offer. Sans-IO.

A sink needs the offer's ticket, unless the offer names that sink or is public. Not here: the ticket
format (kvtransfer/protocol/ticket.py), or whether the offer still exists (kvtransfer/transfer/source.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.messages import Card
from kvtransfer.protocol.outcomes import Reason
from kvtransfer.protocol.ticket import Refusal, Refused, Ticket, Used, check, digest_of, mint
from kvtransfer.transfer.send_queue import Offer, Ware

_REASON = {
    Refusal.EXPIRED: Reason.TICKET_EXPIRED,
    Refusal.WRONG_EPOCH: Reason.TICKET_EXPIRED,
    Refusal.SPENT: Reason.TICKET_SPENT,
}


def by_name(spec: Ware, agent: str) -> bool:
    """Return whether this agent may fetch the offer without a ticket."""
    return spec.public if spec.sink is None else spec.sink == agent


class Leave:
    """Issues and checks the tickets of one agent. `key` is the fleet's. Owned by TransferSource."""

    def __init__(self, key: bytes, card: Card, regions: Sequence[Region]) -> None:
        self._key, self._card, self._regions = key, card, regions
        self._used = Used()

    def write(self, offer: Offer) -> str:
        """Issue a ticket that is valid until the offer's lease ends.

        Raises ValueError if the names make it too long.
        """
        spec = offer.ware
        ticket = Ticket(
            offer=spec.name,
            agent=self._card.agent,
            epoch=self._card.epoch,
            digest=digest_of(spec.blocks, np.concatenate(offer.generations)),
            not_after=offer.lease.deadline,
            nonce=offer.nonces[-1],
            sink=spec.sink,
        )
        return mint(self._key, ticket)

    def read(
        self, text: str, offer: Offer | None, name: str, sink: str, now: float
    ) -> Ticket | Reason:
        """Check a ticket without spending it. Returns the ticket, or the reason for refusing it.

        A valid ticket whose offer does not exist any more is refused as GONE.
        """
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
        """Mark the ticket as used. Returns None, or the reason for refusing it."""
        try:
            self._used.spend(ticket, now)
        except Refused as refused:
            return _REASON.get(refused.reason, Reason.BAD_TICKET)
        return None

    def _digest_now(self, offer: Offer) -> bytes:
        """Return the digest of the offer's blocks at their current generations.

        It differs from the ticket's digest if a block has changed owner since.
        """
        return digest_of(
            offer.ware.blocks,
            np.concatenate([region.generations_of(offer.ware.blocks) for region in self._regions]),
        )
