"""PeerLink: one link as the agent sees it: its peer, its silence, and its sealed messages.

Not here: the meaning of messages, or the links themselves (transports/).
"""

from __future__ import annotations

import threading

import msgspec

from kvtransfer.contract import Link, Transport
from kvtransfer.protocol.messages import VERSION, Card, Message
from kvtransfer.protocol.outcomes import Reason
from kvtransfer.protocol.session import Session
from kvtransfer.util.options import Options


class Dialling(msgspec.Struct, frozen=True, eq=False):
    """A connection that is being dialled.

    where      the peer's address for `transport`
    address    the peer's address as engines know it
    fallback   the link to use instead if this one fails; None: there is none
    lane_of    the link whose windows this one will share; None: a link of its own
    redials    earlier connections to `where` that ended before the peer showed its identity
    """

    transport: Transport
    where: str
    address: str
    fallback: Line | None = None
    lane_of: Line | None = None
    redials: int = 0

    @property
    def led_by(self) -> Line | None:
        """The link over which this agent learnt of `where`; None: it was dialled first."""
        return self.fallback or self.lane_of


class Line:
    """A link and what the agent knows of it.

    is_proven          both ends have proven their identity
    is_in_use          the sink's logic uses the link
    is_handling        the link's thread is handling a message, and may be waiting for the lock
    has_received       the peer has sent a message since the link came into use
    dial_request       what the link was dialled for; None: the peer dialled
    lanes              parallel links that share its windows
    lane_owner         for such a lane: the link whose windows it shares
    is_dialling_lane   a lane is being dialled
    failed_lanes       number of lanes that failed
    """

    __slots__ = (
        "_heard_at", "_received", "_sending", "dialling", "first", "heard", "hearing", "lanes",
        "link", "linked", "misses", "seeking", "session", "up",
    )  # fmt: skip

    def __init__(self, link: Link, session: Session, dialling: Dialling | None, now: float) -> None:
        self.link, self.session, self.dialling = link, session, dialling
        self.first: Line | None = None
        self.lanes: list[Line] = []
        self.misses = 0
        self.up = self.linked = self.hearing = self.heard = self.seeking = False
        self._sending = threading.Lock()
        self._received = -1
        self._heard_at = now

    @property
    def peer(self) -> str:
        if self.session.peer is not None:
            return self.session.peer.agent
        return self.link.peer if self.dialling is None else self.dialling.address

    def of_same_peer(self, other: Line) -> bool:
        """Return whether both links lead to the same start of the same agent."""
        ours, theirs = self.session.peer, other.session.peer
        return (
            ours is not None
            and theirs is not None
            and (ours.agent, ours.epoch) == (theirs.agent, theirs.epoch)
        )

    def say(self, message: Message) -> None:
        """Seal and send in one step, because seals are counted. Callable on any thread."""
        with self._sending:
            self.link.send(self.session.seal(message))

    def silent(self, now: float, late_s: float, options: Options) -> bool:
        """Return whether the peer has been silent for too long. Call it twice per beat.

        A peer is not blamed for `late_s`, by which the caller itself is late, nor for messages that
        wait to be handled here. Before its proof, received bytes do not extend its time.
        """
        received = self.link.received_bytes
        if self.up and (received != self._received or self.hearing):
            self._received, self._heard_at = received, now
        self._heard_at = min(now, self._heard_at + late_s)
        limit_s = options.silence_s if self.up else options.handshake_s
        return now - self._heard_at > limit_s - options.beat_s / 8


def unfit(mine: Card, theirs: Card, version: int) -> tuple[Reason, str] | None:
    """Return why these two agents cannot exchange KV; None if they can."""
    if version != VERSION:
        return Reason.VERSION, f"version {VERSION} here, {version} there"
    if mine.family != theirs.family:
        return Reason.LAYOUT, f"family differs: {mine.family} here, {theirs.family} there"
    mismatch = mine.layout.mismatch(theirs.layout)
    return None if mismatch is None else (Reason.LAYOUT, mismatch)


def astray(peer_link: Line) -> tuple[Reason, str] | None:
    """Return an error if a link reached another agent than the link that led to it.

    An address that one host reports may mean another agent on this host.
    """
    parent = None if peer_link.dialling is None else peer_link.dialling.led_by
    if parent is None or parent.of_same_peer(peer_link):
        return None
    return Reason.UNREACHABLE, f"{peer_link.peer} answers there instead of {parent.peer}"
