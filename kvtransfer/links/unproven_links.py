"""Limits the number of connections whose peer has not yet proven that it has the fleet's key.

There is a limit in total and one per client address. protocol/session_authentication.py checks the
proof, and peer_link.py limits the time for it.
"""

from __future__ import annotations

from collections import Counter

from kvtransfer.transport_interface import Link
from kvtransfer.util.network_addresses import client_address


class UnprovenLinks:
    """The connections whose clients have not yet proven that they have the key; their number is
    limited.

    A new connection is always accepted; if a limit is reached, an old one is dropped. From an
    address with `per_address` connections, the oldest one is dropped. If there are `most`
    connections in total, it is the oldest one of the address with the most connections.
    """

    def __init__(self, most: int, per_address: int) -> None:
        self._most, self._per_address = most, per_address
        self._address_of: dict[Link, str] = {}  # oldest first
        self._count_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, link: Link) -> bool:
        return link in self._address_of

    def admit(self, link: Link) -> Link | None:
        """Add a connection whose peer has not proven its identity yet.

        Returns the connection that the caller must close to stay within the limit, or None.
        """
        address = client_address(link.peer)
        dropped = self._victim(address)
        if dropped is not None:
            self.remove(dropped)
        self._address_of[link] = address
        self._count_of[address] += 1
        return dropped

    def remove(self, link: Link) -> None:
        """Remove a connection that has ended, or whose peer has proven its identity.

        An unknown connection is ignored.
        """
        address = self._address_of.pop(link, None)
        if address is None:
            return
        self._count_of[address] -= 1
        if not self._count_of[address]:
            del self._count_of[address]

    def _victim(self, address: str) -> Link | None:
        if self._count_of[address] >= self._per_address:
            return self._oldest_of(address)
        if len(self._address_of) < self._most:
            return None
        heaviest = max(self._count_of.values())
        return next(link for link, of in self._address_of.items() if self._count_of[of] == heaviest)

    def _oldest_of(self, address: str) -> Link:
        return next(link for link, of in self._address_of.items() if of == address)
