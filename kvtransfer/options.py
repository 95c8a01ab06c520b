"""Options of an agent: its times and bounds, with the defaults that the rest is tested with."""

from __future__ import annotations

import msgspec

from kvtransfer.frame import MOST_PAYLOAD


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """
    beat_s, misses   a link is lost when the peer has been silent for so many beats, which must be the peer's as well
    handshake_s      until then both ends of a new link have proven who they are
    window_bytes     the most that is sent at once; a link may want less
    budget_bytes     what a source may have under way to this agent on one link
    patience_s       how long an invitation may wait here for its offer
    memory_s         how long a name is remembered whose offer ended, that was declined, or that was given up by who
                     waited for it or was about to ask
    most_waiting     invitations that wait here, all in all
    most_strangers   links whose peer has not shown the key; for one more, the oldest is dropped
    unproven_per_address   such links from one IPv4 address or IPv6 /64
    family           what must be equal on both sides besides the layout: weights, quantisation
    host             equal exactly for agents that can share memory; None: found out, "": never
    """

    beat_s: float = 0.25
    misses: int = 3
    handshake_s: float = 2.0
    window_bytes: int = 8 << 20
    budget_bytes: int = 16 << 20
    patience_s: float = 60.0
    memory_s: float = 30.0
    most_waiting: int = 1024
    most_strangers: int = 64
    unproven_per_address: int = 32
    family: str = ""
    host: str | None = None

    def __post_init__(self) -> None:
        if not (self.beat_s >= 0.001 and self.misses >= 1 and self.handshake_s > 0.0):
            raise ValueError(
                f"a peer is heard every so often, and given up after some silence, not {self}"
            )
        if not 0 < self.window_bytes <= MOST_PAYLOAD or self.budget_bytes < 1:
            raise ValueError(
                f"windows have 1 to {MOST_PAYLOAD} bytes and a peer takes some, not {self}"
            )
        if not self.unproven_per_address >= 1 or not self.most_strangers >= 1:
            raise ValueError(f"at least one link must be allowed to prove the key, not {self}")

    @property
    def silence_s(self) -> float:
        return self.beat_s * self.misses
