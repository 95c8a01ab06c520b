"""What a source sends over a link whose bytes NIXL moves: windows, part by part, through its staging memory's slots.

Not here: NIXL itself (nixl_arena.py), what the sink does with a part (nixl.py).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.frame import Kind, frame, pack_head
from kvtransfer.lattice import Runs
from kvtransfer.transports.base import Slice, TransportError, Verdict, WindowHead
from kvtransfer.transports.nixl_arena import Writer
from kvtransfer.transports.outbound import Outbound
from kvtransfer.transports.runs import gather, within

NO_SLOT = 0xFFFFFFFF
POSTED = struct.Struct("<QI")  # number, slot
WRITTEN = struct.Struct("<QIIBQ")  # number, slot, part of its window, verdict, xxh3-64
VERDICTS = (Verdict.OK, Verdict.STALE)
_LAID_BYTES = 64 << 10


def part_of(runs: Runs, begin: int, end: int) -> Runs:
    """Bytes [begin, end) of these runs behind each other: both ends cut a window that no slot holds in the same way."""
    ends = np.cumsum(runs.length)
    first, last = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left"))
    src, dst, length = (each[first : last + 1].copy() for each in (runs.src, runs.dst, runs.length))
    skipped = begin - int(ends[first] - runs.length[first])
    src[0] += skipped
    dst[0] += skipped
    length[0] -= skipped
    length[-1] -= int(ends[last]) - end
    return Runs(src, dst, length)


class _Flight(NamedTuple):
    """A part that NIXL is writing, and what is to be said of it then."""

    number: int
    slot: int
    head: WindowHead
    part: int
    digest: int


class PostedOutbound(Outbound):
    """The source's side: windows part by part into free slots; what follows a window waits until it is written."""

    def __init__(self, fd: int, sent: Callable[[WindowHead], None]) -> None:
        super().__init__(fd, sent, checked=False)
        self.writer: Writer | None = None
        self._window: tuple[WindowHead, Slice] | None = None
        self._part = self._number = 0
        self._dropped = False
        self._flying: deque[_Flight] = deque()

    @property
    def idle(self) -> bool:
        """Also while everything waits for the peer: its word wakes us."""
        if self._flying or self._begin != self._end or self._body is not None:
            return False
        if self._window is not None:
            return self.writer is None or not self.writer.free
        return not self._queue or (self.writer is None and isinstance(self._queue[0], tuple))

    def drop(self, transfer: int) -> None:
        """Parts that NIXL has were read in time, and are ours: they go on. Of the rest nothing is read."""
        super().drop(transfer)
        if self._window is not None and self._window[0].transfer == transfer:
            self._dropped = True

    def _next(self) -> bool:
        self._reap()
        while self._body is None and self._end < _LAID_BYTES and self._go_on():
            pass
        return self._body is not None or self._begin < self._end

    def _reap(self) -> None:
        """In their order: a window's parts are taken so."""
        while self._flying and self.writer is not None and self.writer.done(self._flying[0].number):
            flight = self._flying.popleft()
            self._tell(flight, Verdict.OK)

    def _tell(self, flight: _Flight, verdict: Verdict) -> None:
        said = (flight.number, flight.slot, flight.part, VERDICTS.index(verdict), flight.digest)
        self._lay(frame(Kind.WRITTEN, pack_head(flight.head) + WRITTEN.pack(*said)))

    def _go_on(self) -> bool:
        """Whether there was something to begin."""
        if self._window is not None:
            return self._post(*self._window)
        if not self._queue:
            return False
        item = self._queue[0]
        if isinstance(item, tuple):
            if self.writer is None:
                return False
            self._window, self._part, self._dropped = item, 0, False
        elif self._flying:
            return False
        self._queue.popleft()
        if isinstance(item, bytes):
            self._utter(item)
        return True

    def _post(self, head: WindowHead, window: Slice) -> bool:
        """The next part of the window that has begun. One whose blocks are no longer the source's ends here."""
        writer = self.writer
        assert writer is not None
        if not writer.free:
            return False
        begin = self._part * writer.slot_bytes
        end = min(begin + writer.slot_bytes, head.n_bytes)
        runs, digest = part_of(window.runs, begin, end), xxhash.xxh3_64()
        if window.runs.n_bytes != head.n_bytes or not within(window.region, runs.src, runs.length):
            raise TransportError(f"a window reaches beyond {window.region.name}, or is none")
        slot, current = writer.free[0], not self._dropped and (window.current is None or window.current())
        if current:
            gather(window.region.bytes, runs.src, runs.length, writer.slot(slot, end - begin), _fed_to(digest))
            current = window.current is None or window.current()
        if not current:
            return self._stale(head)
        writer.free.popleft()
        self._number += 1
        writer.post(slot, end - begin, self._number)
        self._flying.append(_Flight(self._number, slot, head, self._part, digest.intdigest()))
        self._lay(frame(Kind.SHARED, POSTED.pack(self._number, slot)))
        self._part += 1
        if end == head.n_bytes:
            self._window = None
            self._sent(head)
        return True

    def _stale(self, head: WindowHead) -> bool:
        """Said behind the parts that were written; whether that could be now."""
        if self._flying:
            self._dropped = True
            return False
        self._tell(_Flight(0, NO_SLOT, head, self._part, 0), Verdict.STALE)
        self._window = None
        self._sent(head)
        return True


def _fed_to(digest: xxhash.xxh3_64) -> Callable[[NDArray[np.uint8]], object]:
    return lambda part: digest.update(part.data)
