"""Divides an offer of KV into shares, if each rank of the fetching engine fetches separately.

The first rank that fetches causes the division, into one share for each rank that needs bytes of
the offer. Each share is fetched and ends separately, and has its own lease. All of them together
protect the offer's blocks. source.py decides what happens when a share ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvtransfer.layout.transfer_plan import sink_ranks
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.protocol.lease import Lease, LeaseError, LeaseEvent, advance
from kvtransfer.transfer.leased_offer import LeasedOffer


class OfferSharing:
    """Divides this agent's offers of KV into shares, one for each rank of a fetching engine.

    card  identity of this agent
    add   function that registers a new share and protects its blocks
    """

    def __init__(self, card: AgentCard, add: Callable[[LeasedOffer], None]) -> None:
        self._card, self._add = card, add
        self._numbers = count(1)

    def share_for(self, offer: LeasedOffer, sink: AgentCard, now: float) -> LeasedOffer | None:
        """Return what the agent `sink` may fetch of an offer: all of it, or the share of its rank.

        Returns None if another engine has begun to fetch the offer, or if its lease has ended. The
        caller checks that the result is not being fetched yet.
        """
        if offer.claimed_by is not None:
            is_same = offer.claimed_by == (sink.group, sink.layout)
            return offer.shares.get(sink.rank) if is_same else None
        layout = self._card.layout
        if (
            sink.only_rank is None
            or offer.link is not None
            or layout.mismatch(sink.layout) is not None
        ):
            return offer
        ranks = sink_ranks(layout, sink.layout, self._card.only_rank)
        if ranks == [sink.rank] or sink.rank not in ranks:
            return offer
        try:
            offer.lease = advance(offer.lease, LeaseEvent.CLAIM, now)
        except LeaseError:
            return None
        self._divide(offer, sink, ranks, now)
        return offer.shares[sink.rank]

    def _divide(self, offer: LeasedOffer, sink: AgentCard, ranks: list[int], now: float) -> None:
        offer.claimed_by = sink.group, sink.layout
        for rank in ranks:
            # Negative, so that no number of the engine's handles is used.
            share = LeasedOffer(-next(self._numbers), offer.spec, offer.generations, now)
            share.lease = Lease(offer.spec.name, offer.lease.deadline)
            share.ready_layers, share.whole, share.rank = offer.ready_layers, offer, rank
            offer.shares[rank] = share
            self._add(share)
