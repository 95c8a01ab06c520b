"""Line: one link as the agent keeps it: who is at the other end, since when it is silent, and messages sealed in order.

Not here: what messages mean, or links themselves.
"""

from __future__ import annotations

import threading

import msgspec

from kvtransfer.ends import Reason
from kvtransfer.messages import VERSION, Card, Message
from kvtransfer.options import Options
from kvtransfer.session import Session
from kvtransfer.transports.base import Link, Transport


class Dialling(msgspec.Struct, frozen=True, eq=False):
    """A line to be: to `where` by `transport`, for the peer that engines know as `address`. `fallback`: the line to use
    in its place if it does not come up. `lane_of`: the line whose windows it is to share. `redials`: connections to
    `where` that ended before the peer said who it is."""

    transport: Transport
    where: str
    address: str
    fallback: Line | None = None
    lane_of: Line | None = None
    redials: int = 0

    @property
    def led_by(self) -> Line | None:
        """The line by which we learnt of this way."""
        return self.fallback or self.lane_of


class Line:
    """`up`: both ends have proven themselves. `linked`: the sink's book uses it. `hearing`: its thread has something
    from the peer in hand, and maybe waits for our lock with it. `dialling`: what it was dialled for; None: we were
    dialled. `lanes`: lines that share its windows; `first`: as such a lane, whose. `seeking`: one is on its way;
    `misses`: so many came to nothing. `heard`: the peer has said something since the line is in use."""

    __slots__ = (
        "_heard_at", "_received", "_sending", "dialling", "first", "heard", "hearing", "lanes", "link", "linked",
        "misses", "seeking", "session", "up",
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
        """Whether both have proven to be one and the same."""
        ours, theirs = self.session.peer, other.session.peer
        return (
            ours is not None
            and theirs is not None
            and (ours.agent, ours.epoch) == (theirs.agent, theirs.epoch)
        )

    def say(self, message: Message) -> None:
        """Any thread: seals count, so sealing and sending are one step."""
        with self._sending:
            self.link.send(self.session.seal(message))

    def silent(self, now: float, late_s: float, options: Options) -> bool:
        """Whether the peer has said nothing for too long. Asked twice a beat; `late_s`: by how much we are late
        ourselves, which is no fault of the peer's, and neither is a message that we have yet to take in. Who has proven
        nothing buys no time by a byte now and then."""
        received = self.link.received_bytes
        if self.up and (received != self._received or self.hearing):
            self._received, self._heard_at = received, now
        self._heard_at = min(now, self._heard_at + late_s)
        limit_s = options.silence_s if self.up else options.handshake_s
        return now - self._heard_at > limit_s - options.beat_s / 8


def unfit(mine: Card, theirs: Card, version: int) -> tuple[Reason, str] | None:
    """Why these two cannot exchange KV; None if they can."""
    if version != VERSION:
        return Reason.VERSION, f"version {VERSION} here, {version} there"
    if mine.family != theirs.family:
        return Reason.LAYOUT, f"family differs: {mine.family} here, {theirs.family} there"
    mismatch = mine.layout.mismatch(theirs.layout)
    return None if mismatch is None else (Reason.LAYOUT, mismatch)


def astray(line: Line) -> tuple[Reason, str] | None:
    """A way that led to somebody else than the line by which we learnt of it: an address means little on another
    host."""
    before = None if line.dialling is None else line.dialling.led_by
    if before is None or before.of_same_peer(line):
        return None
    return Reason.UNREACHABLE, f"{line.peer} answers there, and not {before.peer}"
