"""The limit on a tenant's requests in progress, at all gateways together. No I/O.

Each gateway counts its own requests, and the other gateways report theirs. The limits per minute
are in quota.py, and gateway/peers/usage_sync.py exchanges the numbers.
"""

from __future__ import annotations

FIRST_HELD_S = 1.0
"""Assumed duration of a request, in seconds, before any request of the tenant has ended."""
WEIGHT = 1 / 16
"""Weight of the newest request in the mean duration."""


class ConcurrencyLimit:
    """The requests of one tenant that are in progress, and how many there may be.

    limit  maximum number of requests in progress at all gateways together
    own    number of requests in progress at this gateway
    """

    __slots__ = ("_held_s", "_peers", "limit", "own")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.own = 0
        self._peers: dict[bytes, int] = {}
        self._held_s = FIRST_HELD_S

    @property
    def in_progress(self) -> int:
        """Return how many of the tenant's requests are in progress, at all gateways together."""
        return self.own + sum(self._peers.values()) if self._peers else self.own

    def has_place(self, requests: int) -> bool:
        """Return whether `requests` more requests of the tenant may begin now, within its limit.

        The limit counts each prompt of a request. A request with more prompts than the limit may
        begin while no other one is in progress, since it could never begin otherwise.
        """
        busy = self.in_progress
        return busy + requests <= self.limit or not busy

    def take(self, requests: int) -> None:
        """Count `requests` more requests of the tenant as in progress at this gateway."""
        self.own += requests

    def release(self, requests: int, held_s: float | None) -> None:
        """Count `requests` of the tenant's requests as ended.

        held_s  seconds for which they were in progress; None if they were refused

        The durations give the expected wait of later requests (`wait_s`). Refused requests are left
        out: they end immediately, and say nothing about how long others take.
        """
        self.own -= requests
        if held_s is not None:
            self._held_s += WEIGHT * (max(0.0, held_s) - self._held_s)

    def wait_s(self, requests: int) -> float:
        """Return the expected seconds until `requests` more requests may begin.

        Requests in progress are assumed to end evenly over the mean duration.
        """
        busy = self.in_progress
        missing = busy + min(requests, self.limit) - self.limit
        return self._held_s * missing / busy if busy and missing > 0 else 0.0

    def set_peer(self, peer: bytes, requests: int) -> None:
        """Set how many requests of the tenant are in progress at another gateway."""
        if requests:
            self._peers[peer] = requests
        else:
            self._peers.pop(peer, None)
