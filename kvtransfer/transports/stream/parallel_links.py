"""Sends KV to an agent over several TCP connections in parallel, which are called lanes.

With one connection, only one core of the receiver copies, which is too slow for a fast network. A
lane belongs to the first connection, its owner. An idle lane sends the next unit of KV (window) of
the owner's queue. Agents prove their identity on each lane.

Messages are sent only on the first connection, so that their order is kept. A window must not
overtake the message that announces its transfer. Therefore lanes may send windows of a transfer
only after the sink has received one and replied with SPREAD.

link_manager.py opens lanes and detects their loss; LinkOptions has their number.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvtransfer.protocol.frame import FrameError, FrameKind, encode_frame
from kvtransfer.transport_interface import Link, LinkOwner, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.stream.link import StreamLink
from kvtransfer.transports.stream.link_options import LinkOptions

_SPREAD = struct.Struct("<Q")


class LanedLink(StreamLink):
    """A link over a stream socket that can have parallel connections (lanes), or be one itself."""

    def __init__(
        self,
        sock: socket.socket,
        owner: LinkOwner,
        peer: str,
        options: LinkOptions,
        ended: Callable[[Any], None],
    ) -> None:
        super().__init__(sock, owner, peer, options, ended)
        self.lanes = options.lanes
        self.has_carried_windows = False
        self._lane_owner = self  # the link whose windows it carries
        self._lane_links: tuple[LanedLink, ...] = ()
        self._spread: set[int] = set()

    # ---- methods that any thread may call ----

    def add_lane(self, lane: Link) -> None:
        if not isinstance(lane, LanedLink):
            raise TypeError(
                f"a connection over the transport {lane.transport} cannot be a lane (parallel "
                "connection)"
            )
        lane._lane_owner = self
        with self._gate:
            self._lane_links += (lane,)

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        super().put(head, window)
        self._wake_lanes()

    def drop(self, transfer: int) -> None:
        self._out.deny_lanes(transfer)
        super().drop(transfer)
        for lane in self._lane_links:
            lane.drop(transfer)

    def _wake_lanes(self) -> None:
        # Wake sleeping lanes (parallel connections) if there are windows that they may send.
        if self._lane_links and self._out.has_spare:
            for lane in self._lane_links:
                lane._has_lane_work = True
                lane._wake()

    # ---- on the link's thread ----

    def _move_bytes(self) -> bool:
        self._has_lane_work = False
        if self._lane_owner is not self and self._out.is_idle:
            item = self._lane_owner._out.take_spare()
            if item is not None:
                self.has_carried_windows = True
                self._note_window()
                self._out.enqueue(item)
        return super()._move_bytes()

    def on_frame(self, kind: FrameKind, header: bytes) -> None:
        if kind is not FrameKind.SPREAD:
            super().on_frame(kind, header)
        elif self._dialled:
            raise FrameError("the sender of KV sent a SPREAD frame, which only a receiver may send")
        elif len(header) != _SPREAD.size:
            raise FrameError(f"a SPREAD frame has {len(header)} bytes instead of {_SPREAD.size}")
        else:
            self._out.allow_lanes(*_SPREAD.unpack(header))
            self._wake_lanes()

    def _fence(self, transfer: int) -> None:
        self._spread.discard(transfer)
        super()._fence(transfer)

    def _report_fenced(self, transfer: int) -> None:
        self._fence_lanes(transfer, self._lane_links)

    def _fence_lanes(self, transfer: int, lanes: tuple[LanedLink, ...]) -> None:
        # Stop the lanes (parallel connections) one after the other, each on its own thread.
        # Afterwards, report the fence.
        #
        # A lane that has ended writes no more. A lane that is added meanwhile gets no destination
        # from the owner.
        for index, lane in enumerate(lanes, start=1):
            if lane._order(partial(lane._fence_lane, transfer, lanes[index:])):
                return
        self._owner.on_fenced(self, transfer)

    def _fence_lane(self, transfer: int, remaining: tuple[LanedLink, ...]) -> None:
        self._in.discard_transfer(transfer)
        self._lane_owner._fence_lanes(transfer, remaining)

    def _release(self) -> None:
        owner = self._lane_owner
        with owner._gate:
            owner._lane_links = tuple(lane for lane in owner._lane_links if lane is not self)

    # ---- events, reported as the first link's ----

    def place_window(self, head: WindowHead) -> WindowSlice | None:
        self._note_window()
        owner_link = self._lane_owner
        window = owner_link._owner.place_window(owner_link, head)
        if owner_link is not self:
            self.has_carried_windows = True
        elif window is not None and self._lane_links and head.transfer not in self._spread:
            self._spread.add(head.transfer)
            self._out.enqueue(encode_frame(FrameKind.SPREAD, _SPREAD.pack(head.transfer)))
            self._send_available()  # before the window is read, because lanes wait for it
        return window

    def following_windows(
        self, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        # With lanes, the next window may arrive on another connection.
        if self._lane_links or self._lane_owner is not self:
            return ()
        return super().following_windows(head, most)

    def on_landed(self, head: WindowHead, verdict: WindowVerdict) -> None:
        self._lane_owner._owner.on_landed(self._lane_owner, head, verdict)

    def _sent(self, head: WindowHead) -> None:
        self._note_window()
        self._lane_owner._owner.on_sent(self._lane_owner, head)
