"""The other gateways from which messages have arrived recently.

One of them sends its state to a gateway that has just started (warm-up). This module decides which
one.
"""

from __future__ import annotations

from collections.abc import Iterator

EXPIRY_S = 2.0
"""Seconds without any message after which a gateway counts as stopped, and its reservations are
removed."""


class Peer:
    """Another gateway of the same group, as known from its messages.

    last_seen_at  when its last message arrived (monotonic seconds)
    started_at    its start, on this gateway's clock (monotonic seconds)
    shares        the endpoints where it has reservations, as digests (keyed hashes of their names)
    is_warm       whether it can send its state to a gateway that has just started
    """

    __slots__ = ("is_warm", "last_seen_at", "shares", "started_at")

    def __init__(self, now: float) -> None:
        self.last_seen_at = self.started_at = now
        self.is_warm = False
        self.shares: frozenset[int] = frozenset()


class PeerTable:
    """The other gateways that have recently sent messages, by id. Only PeerView changes it."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[bytes, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_warm_peer(self) -> bool:
        return any(peer.is_warm for peer in self._by_id.values())

    def update(self, peer_id: bytes, uptime_s: float, *, is_warm: bool, now: float) -> Peer:
        """Add a gateway that has sent its state, or update its entry; return the entry.

        uptime_s  seconds since the start of that gateway
        is_warm   whether it can send its state to a gateway that has just started
        now       monotonic seconds
        """
        peer = self._by_id.get(peer_id)
        if peer is None:
            peer = self._by_id[peer_id] = Peer(now)
        peer.last_seen_at, peer.started_at, peer.is_warm = now, now - uptime_s, is_warm
        return peer

    def remove(self, peer_id: bytes) -> Peer | None:
        """Remove a gateway that has stopped or sent nothing for too long.

        Returns its entry, or None if it is not known.
        """
        return self._by_id.pop(peer_id, None)

    def expired(self, now: float) -> Iterator[bytes]:
        """Yield the ids of the other gateways that have sent nothing for EXPIRY_S seconds."""
        peers = self._by_id.items()
        yield from [peer_id for peer_id, peer in peers if now - peer.last_seen_at > EXPIRY_S]

    def is_responder(self, own_id: bytes, started_at: float, new_peer: bytes, attempt: int) -> bool:
        """Return whether this gateway must send its state to `new_peer`.

        The gateway that started first must. If its answer does not come, the new gateway asks
        again, and the gateway that started next must answer.

        own_id      id of this gateway
        started_at  start of this gateway (monotonic seconds)
        new_peer    id of the gateway that has just started
        attempt     number of earlier requests of `new_peer` that were not answered
        """
        warm = [
            (peer.started_at, peer_id)
            for peer_id, peer in self._by_id.items()
            if peer.is_warm and peer_id != new_peer
        ]
        ranks = sorted([*warm, (started_at, own_id)])
        return ranks[attempt % len(ranks)][1] == own_id
