"""Lanes: more connections to a link's peer that take windows off its queue. What one flow carries, one core at the sink
has to copy; a fast network has room for several.

A lane is a link that has proven itself like any other (switchboard.py) and then belongs to the first: it carries
windows alone, one at a time, whenever it has nothing else to do. Messages keep their order on the first link, so a
transfer's windows go by that one too until the sink has taken one in, and says so (SPREAD): no window overtakes the
message that announces it. Not here: who opens lanes (switchboard.py), how many are wanted (stream.Manner).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from kvtransfer.frame import FrameError, Kind, frame
from kvtransfer.transports.base import Link, LinkOwner, Slice, Verdict, WindowHead
from kvtransfer.transports.stream import Manner, StreamLink

_SPREAD = struct.Struct("<Q")
# A lane has no beats of its own: bytes that nobody acknowledges for so long end it.
_LOST_MS = 3000


class LanedLink(StreamLink):
    """A link that may have lanes, or be one."""

    def __init__(
        self, sock: socket.socket, owner: LinkOwner, peer: str, manner: Manner, ended: Callable[[Any], None]
    ) -> None:
        super().__init__(sock, owner, peer, manner, ended)
        self.lanes = manner.lanes
        self._wide = Lanes(self)
        self._spread: set[int] = set()
        self._first: LanedLink | None = None
        self.used = False  # as a lane: a window has gone by it

    @property
    def owner(self) -> LinkOwner:
        return self._owner

    # ---- from any thread ----

    def widen(self, lane: Link) -> None:
        if not isinstance(lane, LanedLink):
            raise TypeError(f"a link over {lane.transport} is no lane")
        lane._belong(self)
        self._wide.add(lane)
        if self._closing or self._ended or self._broken is not None:
            lane.close()

    def put(self, head: WindowHead, window: Slice) -> None:
        super().put(head, window)
        self._call()

    def drop(self, transfer: int) -> None:
        self._out.keep(transfer)
        super().drop(transfer)
        for lane in self._wide.all:
            lane.drop(transfer)

    def spare(self) -> tuple[WindowHead, Slice] | None:
        """A window for a lane to send."""
        return self._out.spare()

    @property
    def crowded(self) -> bool:
        """Whether a lane could be of use."""
        return self._out.crowded

    def fail(self, why: str) -> None:
        """The link ends: a window that was on its way will never come."""

        def end() -> None:
            self._broken = self._broken or why

        self._order(end)

    def _belong(self, first: LanedLink) -> None:
        self._first, self._owner = first, first._wide
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)

    def _call(self) -> None:
        """Lanes that sleep may be of use."""
        if self._wide.all and self._out.crowded:
            for lane in self._wide.all:
                lane._called = True
                lane._wake()

    # ---- on the link's thread ----

    def _turn(self) -> bool:
        self._called = False
        if self._first is not None and self._out.idle:
            found = self._first.spare()
            if found is not None:
                self.used = True
                self._out.queue(found)
        return super()._turn()

    def framed(self, kind: Kind, header: bytes) -> None:
        if kind is not Kind.SPREAD:
            super().framed(kind, header)
        elif self._dialled or len(header) != _SPREAD.size:
            raise FrameError("it is for the sink to say how windows may come")
        else:
            self._out.share(*_SPREAD.unpack(header))
            self._call()

    def incoming(self, head: WindowHead) -> Slice | None:
        window = super().incoming(head)
        if window is not None and self._wide.all and head.transfer not in self._spread:
            self._spread.add(head.transfer)
            self._out.queue(frame(Kind.SPREAD, _SPREAD.pack(head.transfer)))
            self._out.pump()  # before the window is read: lanes wait for it
        return window

    def _fence(self, transfer: int) -> None:
        self._spread.discard(transfer)
        super()._fence(transfer)

    def _fenced(self, transfer: int) -> None:
        self._wide.fence(transfer)

    def _release(self) -> None:
        for lane in self._wide.all:
            lane.close()


class Lanes:
    """The owner of a link's lanes, which tells the link's own owner what they tell."""

    def __init__(self, link: LanedLink) -> None:
        self._link = link
        self.all: tuple[LanedLink, ...] = ()

    def add(self, lane: LanedLink) -> None:
        self.all += (lane,)

    def fence(self, transfer: int, *, at: int = 0) -> None:
        """One lane after the other stops writing; then it is told."""
        if at < len(self.all):
            self.all[at].fence(transfer)
        else:
            self._link.owner.fenced(self._link, transfer)

    # ---- what lanes tell (LinkOwner) ----

    def linked(self, link: Link) -> None:
        """Never: it was linked before it became a lane."""

    def message(self, link: Link, data: bytes) -> None:
        self._link.fail("a message came by a lane, which carries windows alone")

    def incoming(self, link: Link, head: WindowHead) -> Slice | None:
        assert isinstance(link, LanedLink)
        link.used = True
        return self._link.owner.incoming(self._link, head)

    def landed(self, link: Link, head: WindowHead, verdict: Verdict) -> None:
        self._link.owner.landed(self._link, head, verdict)

    def sent(self, link: Link, head: WindowHead) -> None:
        self._link.owner.sent(self._link, head)

    def fenced(self, link: Link, transfer: int) -> None:
        lanes = self.all
        self.fence(transfer, at=next(at for at, lane in enumerate(lanes) if lane is link) + 1)

    def lost(self, link: Link, reason: str) -> None:
        """A source that wants no lane hangs up. One that has used it knows what it lost, whatever the sink has seen."""
        assert isinstance(link, LanedLink)
        if link.used:
            self._link.fail(f"a lane is lost: {reason}")
