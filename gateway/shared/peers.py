"""Who else is there: the other gateways as far as they were heard lately, and who tells a newcomer what it missed."""

from __future__ import annotations

from collections.abc import Iterator

GONE_S = 2.0
"""Who has said nothing for so long is gone, and holds nothing any more."""


class Peer:
    """Another gateway. `born_at`: on our clock; `shares`: endpoints where it holds something."""

    __slots__ = ("born_at", "heard_at", "shares", "warm")

    def __init__(self, now: float) -> None:
        self.heard_at = self.born_at = now
        self.warm = False
        self.shares: frozenset[int] = frozenset()


class Peers:
    """The living, by id. One owner, the View."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[bytes, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def anybody_warm(self) -> bool:
        return any(peer.warm for peer in self._by_id.values())

    def heard(self, who: bytes, uptime_s: float, *, warm: bool, now: float) -> Peer:
        peer = self._by_id.get(who)
        if peer is None:
            peer = self._by_id[who] = Peer(now)
        peer.heard_at, peer.born_at, peer.warm = now, now - uptime_s, warm
        return peer

    def gone(self, who: bytes) -> Peer | None:
        """It said goodbye, or nothing for too long."""
        return self._by_id.pop(who, None)

    def silent(self, now: float) -> Iterator[bytes]:
        """Who is to be taken for gone."""
        yield from [who for who, peer in self._by_id.items() if now - peer.heard_at > GONE_S]

    def answers(self, me: bytes, born_at: float, newcomer: bytes, attempt: int) -> bool:
        """Whether it is on us to tell a newcomer: on whoever lives longest and, if that one did not, on the next."""
        able = [(peer.born_at, who) for who, peer in self._by_id.items() if peer.warm and who != newcomer]
        ranks = sorted([*able, (born_at, me)])
        return ranks[attempt % len(ranks)][1] == me
