"""Lanes: more connections to a link's peer that take windows off its queue. What one flow carries, one core at the sink
has to copy; a fast network has room for several.

A lane is a link that has proven itself like any other and then belongs to the first: whenever it has nothing else to do
it takes one of that one's windows. Messages keep their order on the first link, so a transfer's windows go by that one
too until the sink has taken one in, and says so (SPREAD): no window overtakes the message that announces it. Not here:
who opens lanes, says that they live and hears that they end (switchboard.py), how many are wanted (stream.Manner).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtransfer.frame import FrameError, Kind, frame
from kvtransfer.transports.base import Link, LinkOwner, Slice, Verdict, WindowHead
from kvtransfer.transports.stream import Manner, StreamLink

_SPREAD = struct.Struct("<Q")


class LanedLink(StreamLink):
    """A link that may have lanes, or be one."""

    def __init__(
        self,
        sock: socket.socket,
        owner: LinkOwner,
        peer: str,
        manner: Manner,
        ended: Callable[[Any], None],
    ) -> None:
        super().__init__(sock, owner, peer, manner, ended)
        self.lanes = manner.lanes
        self.used = False
        self._first = self  # whose windows go by here
        self._wide: tuple[LanedLink, ...] = ()
        self._spread: set[int] = set()

    # ---- from any thread ----

    def widen(self, lane: Link) -> None:
        if not isinstance(lane, LanedLink):
            raise TypeError(f"a link over {lane.transport} is no lane")
        lane._first = self
        with self._gate:
            self._wide += (lane,)

    def put(self, head: WindowHead, window: Slice) -> None:
        super().put(head, window)
        self._call()

    def drop(self, transfer: int) -> None:
        self._out.keep(transfer)
        super().drop(transfer)
        for lane in self._wide:
            lane.drop(transfer)

    def _call(self) -> None:
        """Lanes that sleep may be of use."""
        if self._wide and self._out.crowded:
            for lane in self._wide:
                lane._called = True
                lane._wake()

    # ---- on the link's thread ----

    def _turn(self) -> bool:
        self._called = False
        if self._first is not self and self._out.idle:
            found = self._first._out.spare()
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

    def _fence(self, transfer: int) -> None:
        self._spread.discard(transfer)
        super()._fence(transfer)

    def _fenced(self, transfer: int) -> None:
        self._fence_lanes(transfer, self._wide)

    def _fence_lanes(self, transfer: int, lanes: tuple[LanedLink, ...]) -> None:
        """One after the other stops writing, each on its own thread; then it is told. One that has ended writes no
        more, and one that comes meanwhile is led nowhere by the owner."""
        for at, lane in enumerate(lanes, start=1):
            if lane._order(partial(lane._fence_lane, transfer, lanes[at:])):
                return
        self._owner.fenced(self, transfer)

    def _fence_lane(self, transfer: int, rest: tuple[LanedLink, ...]) -> None:
        self._in.divert(transfer)
        self._first._fence_lanes(transfer, rest)

    def _release(self) -> None:
        first = self._first
        with first._gate:
            first._wide = tuple(lane for lane in first._wide if lane is not self)

    # ---- what came and went, told as the first link's ----

    def incoming(self, head: WindowHead) -> Slice | None:
        first = self._first
        window = first._owner.incoming(first, head)
        if first is not self:
            self.used = True
        elif window is not None and self._wide and head.transfer not in self._spread:
            self._spread.add(head.transfer)
            self._out.queue(frame(Kind.SPREAD, _SPREAD.pack(head.transfer)))
            self._out.pump()  # before the window is read: lanes wait for it
        return window

    def landed(self, head: WindowHead, verdict: Verdict) -> None:
        self._first._owner.landed(self._first, head, verdict)

    def _sent(self, head: WindowHead) -> None:
        self._first._owner.sent(self._first, head)
