"""Nixl: bytes go by NIXL's one-sided writes, beside a TCP link of ours that says what may be written and what was.

Windows are copied into the source's staging memory, written by NIXL into the sink's, and copied to their blocks when
they are proven: the sink's own thread alone writes blocks, so the fence is where it is over TCP. Not chosen unless both
ends name it. Not here: NIXL itself (nixl_arena.py), what a source sends (nixl_out.py), the thread (stream.py).
"""

from __future__ import annotations

import hmac
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from kvtransfer.frame import FrameError, Kind, frame, unpack_head
from kvtransfer.regions import Region
from kvtransfer.reshard import Blocks
from kvtransfer.transports.base import LinkOwner, Slice, TransportError, Verdict, WindowHead
from kvtransfer.transports.nixl_arena import Arena, Writer, unavailable
from kvtransfer.transports.nixl_out import NO_SLOT, POSTED, VERDICTS, WRITTEN, PostedOutbound, part_of
from kvtransfer.transports.runs import scatter, within
from kvtransfer.transports.stream import Manner, StreamLink
from kvtransfer.transports.tcp import Tcp

SLOTS, SLOT_BYTES = 4, 2 << 20
_MAC_BYTES = 32
_TAKEN = struct.Struct("<I")
_NOTICE_S = 1.0  # what NIXL has delivered it has to admit to


class _Arrival:
    """A window whose parts come in. `window` None: nobody wants it any more."""

    def __init__(self, head: WindowHead, window: Slice | None) -> None:
        self.head, self.window = head, window
        self.part = self.n_bytes = 0


class NixlLink(StreamLink):
    transport = "nixl"

    def __init__(
        self, sock: socket.socket, owner: LinkOwner, peer: str, manner: Manner, ended: Callable[[Any], None]
    ) -> None:
        super().__init__(sock, owner, peer, manner, ended)
        self.window_bytes = SLOT_BYTES
        self._out = self._posted_out = PostedOutbound(sock.fileno(), self._sent)
        self._key = b""
        self._arena: Arena | None = None
        self._arrival: _Arrival | None = None

    def secure(self, window_key: bytes) -> None:
        super().secure(window_key)
        self._key = window_key

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """Nothing that is this transfer's alone. With the first one the peer gets our staging memory to write."""
        self._order(self._open_arena)
        return b""

    def framed(self, kind: Kind, header: bytes) -> None:
        if kind is Kind.REGIONS:
            self._take_grant(header)
        elif kind is Kind.SHARED:
            self._of_arena().post(*_unpacked(POSTED, header))
        elif kind is Kind.WRITTEN:
            self._take_in(header)
        elif kind is Kind.TAKEN:
            self._take_back(*_unpacked(_TAKEN, header))
        else:
            super().framed(kind, header)

    # ---- the source ----

    def _take_grant(self, grant: bytes) -> None:
        """NIXL reads what it is given without much care: one wrong bit can end this process. So it gets only what comes
        from a peer that has proven itself, over this very link."""
        if not self._key or self._dialled or self._posted_out.writer is not None:
            raise FrameError("a grant that nobody asked for")
        mac, said = grant[:_MAC_BYTES], grant[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, said)):
            raise FrameError("a grant that the peer has not made")
        self._posted_out.writer = Writer(said)

    def _take_back(self, slot: int) -> None:
        writer = self._posted_out.writer
        if writer is None or slot >= writer.slots or slot in writer.free:
            raise FrameError(f"slot {slot} comes back and was not away")
        writer.free.append(slot)

    # ---- the sink ----

    def _open_arena(self) -> None:
        if self._arena is None and self._dialled and self._key and not self._closing and self._broken is None:
            self._arena = Arena(SLOTS, SLOT_BYTES)
            self._out.queue(frame(Kind.REGIONS, _mac(self._key, self._arena.grant) + self._arena.grant))

    def _of_arena(self) -> Arena:
        if self._arena is None:
            raise FrameError("something is written where nothing was granted")
        return self._arena

    def _turn(self) -> bool:
        """NIXL writes while we ask it to. Nobody tells us when that is worth it, so we go on until all is there."""
        moved = super()._turn()
        if self._arena is None or not self._arena.posted:
            return moved
        self._arena.progress()
        os.sched_yield()
        return True

    def _take_in(self, header: bytes) -> None:
        """A part was written: prove it, and put it into its place."""
        arena, size = self._of_arena(), len(header) - WRITTEN.size
        head = unpack_head(header)
        number, slot, part, verdict, digest = _unpacked(WRITTEN, header[max(size, 0) :])
        if verdict >= len(VERDICTS) or (slot == NO_SLOT) != (VERDICTS[verdict] is Verdict.STALE):
            raise FrameError("a verdict that nobody has")
        arrival = self._arriving(head, part)
        if slot == NO_SLOT:
            return self._landed_as(arrival, Verdict.STALE)
        if arena.posted.get(number) != slot:
            raise FrameError(f"slot {slot} was not being written")
        self._await(arena, number)
        arena.done(number)
        self._place(arena, slot, arrival, digest)
        self._out.queue(frame(Kind.TAKEN, _TAKEN.pack(slot)))
        return None

    def _arriving(self, head: WindowHead, part: int) -> _Arrival:
        """The window that this part is of. Windows come one after the other, and their parts in order."""
        arrival = self._arrival
        if arrival is None and part == 0:
            window = self._owner.incoming(self, head)
            if window is not None:
                runs = window.runs
                if runs.n_bytes != head.n_bytes or not within(window.region, runs.dst, runs.length):
                    raise FrameError(f"a window of {head.n_bytes} bytes is not what the plan has")
            self._arrival = arrival = _Arrival(head, window)
        if arrival is None or arrival.head != head or arrival.part != part:
            raise FrameError("a part of a window that is not its next")
        return arrival

    def _await(self, arena: Arena, number: int) -> None:
        """The source says it is there; so does NIXL, or this link is of no use."""
        until_s = time.perf_counter() + _NOTICE_S
        while not arena.written(number):
            if time.perf_counter() > until_s:
                raise TransportError("the peer says that it has written, and NIXL does not")
            os.sched_yield()

    def _place(self, arena: Arena, slot: int, arrival: _Arrival, digest: int) -> None:
        """From a copy: the peer could write the slot again between the look and the landing."""
        begin, whole = arrival.n_bytes, arrival.head.n_bytes
        arrival.n_bytes = end = min(begin + arena.slot_bytes, whole)
        arrival.part += 1
        if arrival.window is not None:
            data = arena.slot(slot, end - begin).copy()
            if xxhash.xxh3_64_intdigest(data.data) != digest:
                self._owner.landed(self, arrival.head, Verdict.CORRUPT)
                arrival.window = None
            else:
                runs = part_of(arrival.window.runs, begin, end)
                scatter(data, arrival.window.region.bytes, runs.dst, runs.length)
        if end == whole:
            self._landed_as(arrival, Verdict.OK)

    def _landed_as(self, arrival: _Arrival, verdict: Verdict) -> None:
        self._arrival = None
        if arrival.window is not None:
            self._owner.landed(self, arrival.head, verdict)

    def _fence(self, transfer: int) -> None:
        if self._arrival is not None and self._arrival.head.transfer == transfer:
            self._arrival.window = None
        super()._fence(transfer)

    def _farewell(self) -> None:
        with suppress(TransportError):
            super()._farewell()

    def _release(self) -> None:
        """Before anybody hears that the link is lost: NIXL writes nothing for it any more."""
        for each in (self._arena, self._posted_out.writer):
            if each is not None:
                each.close()


class Nixl(Tcp):
    """Listens like Tcp, for the links beside which NIXL writes. NIXL's UCX listens besides, wherever UCX_NET_DEVICES
    says, and asks nobody who he is: only where the network is trusted. Windows are never sealed."""

    name = "nixl"
    _made = NixlLink

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, advertise: str | None = None) -> None:
        super().__init__(host, port, Manner(), advertise=advertise)

    @staticmethod
    def unavailable() -> str | None:
        """Why there is no NIXL on this host; None where there is."""
        return unavailable()

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Raises TransportError where there is no NIXL. The first agent of a process takes half a second: it is made
        here, so that no link stands still for it."""
        reason = unavailable()
        if reason is not None:
            raise TransportError(reason)
        Arena(1, mmap.PAGESIZE).close()
        return super().start(owner, regions)


def _mac(key: bytes, grant: bytes) -> bytes:
    return hmac.digest(key, b"nixl grant" + grant, "sha256")


def _unpacked(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) != form.size:
        raise FrameError(f"{len(data)} bytes where {form.size} belong")
    return form.unpack(data)
