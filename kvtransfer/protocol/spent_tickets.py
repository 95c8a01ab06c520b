"""Remembers used tickets, so that a ticket (permission to fetch an offer) works only once."""

from __future__ import annotations

from heapq import heappop, heappush

from kvtransfer.protocol.ticket import Ticket, TicketRefusal, TicketRefused


class SpentTickets:
    """The tickets (permissions to fetch KV) that were used, each remembered until it expires.

    Each rank of the fetching engine uses a ticket separately. The number of remembered tickets is
    limited; beyond that, further tickets are refused. Not thread-safe.
    """

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._nonces: set[bytes] = set()
        self._by_end: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._nonces)

    def check_unspent(self, ticket: Ticket, now: float, rank: int = -1) -> None:
        """Raise TicketRefused if this rank has already used the ticket (permission to fetch KV).

        Also raises it if so many tickets are remembered that no further one can be.

        rank  the rank that fetches; -1: the agent serves all ranks of its engine
        """
        while self._by_end and self._by_end[0][0] <= now:
            self._nonces.discard(heappop(self._by_end)[1])
        if _spent_key(ticket, rank) in self._nonces:
            raise TicketRefused(
                TicketRefusal.SPENT,
                "the ticket has already been used; each ticket is valid for one transfer",
            )
        if len(self._nonces) >= self._most:
            raise TicketRefused(
                TicketRefusal.TOO_MANY,
                "too many used tickets are remembered "
                f"({self._most}); further tickets are "
                "refused for now",
            )

    def spend(self, ticket: Ticket, now: float, rank: int = -1) -> None:
        """Mark a ticket as used by a rank.

        Raises TicketRefused under the same conditions as check_unspent().
        """
        self.check_unspent(ticket, now, rank)
        key = _spent_key(ticket, rank)
        self._nonces.add(key)
        heappush(self._by_end, (ticket.not_after, key))


def _spent_key(ticket: Ticket, rank: int) -> bytes:
    return ticket.nonce if rank < 0 else ticket.nonce + rank.to_bytes(4, "little")
