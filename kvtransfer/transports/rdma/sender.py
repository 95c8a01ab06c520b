"""The sending side of an RDMA connection: it writes KV into the other agent's memory. No I/O.

The device reads a unit of KV (window) at some time between a write request and its completion. So
only after the completion is it known whether the blocks were unchanged. link.py creates queue pairs
and reports the result to the receiver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.rdma.memory_grants import RemoteGrant, Write, digest_of
from kvtransfer.transports.rdma.verbs import LocalRange

MOST_WRITES = 256
MOST_WINDOWS = 16
_SIGNAL_EVERY = 64


class QueuePairWriter(Protocol):
    """The interface of one end of an RDMA connection by which RdmaSender writes KV."""

    def write(
        self,
        number: int,
        pieces: list[LocalRange],
        target: tuple[int, int],
        *,
        signalled: bool,
        immediate: int | None = None,
    ) -> None: ...


class OutgoingWindow:
    """A unit of KV (window) that waits to be written over RDMA, or is being written.

    writes   its write requests; None until it begins
    verdict  whether its blocks were unchanged; None until this is known
    """

    __slots__ = (
        "at",
        "digest",
        "head",
        "is_done",
        "is_dropped",
        "next",
        "number",
        "verdict",
        "window",
        "writes",
    )  # fmt: skip

    def __init__(self, number: int, head: WindowHead, window: WindowSlice) -> None:
        self.number = number
        self.head = head
        self.window = window
        self.writes: list[Write] | None = None
        self.next = 0
        self.at: int | None = None
        self.digest: int | None = None
        self.verdict: WindowVerdict | None = None
        self.is_done = False
        self.is_dropped = False

    def is_current(self) -> bool:
        return self.window.is_current is None or self.window.is_current()


class RdmaSender:
    """Sends KV over one connection by RDMA writes, one unit (window) after another.

    `ended` is called once for each window that has begun, when its memory is not read any more.
    """

    def __init__(
        self,
        key_of: Callable[[Region], int],
        ended: Callable[[OutgoingWindow], None],
        *,
        gather: int,
        checksums: bool,
    ) -> None:
        self._key_of, self._ended, self._gather, self._checksums = key_of, ended, gather, checksums
        self._grants: dict[int, RemoteGrant] = {}
        self._numbers = 0
        self._queue: deque[OutgoingWindow] = deque()
        self._in_flight: dict[int, OutgoingWindow] = {}
        self._free = MOST_WRITES
        self._unsignalled = 0
        self._signalled: deque[tuple[int, OutgoingWindow | None]] = deque()

    def accept(self, transfer: int, grant: bytes) -> None:
        """Store the sink's permission to write for a transfer. Raises TransportError if invalid."""
        self._grants[transfer] = RemoteGrant(grant)

    def withdraw(self, transfer: int) -> None:
        """Stop writing for this transfer, because the sink has withdrawn its permission."""
        self._grants.pop(transfer, None)

    def put(self, head: WindowHead, window: WindowSlice) -> OutgoingWindow:
        """Queue a unit of KV (window) for sending, and return the object that represents it.

        Raises TransportError when the connection has used its 4 billion window numbers.
        """
        if self._numbers >= 1 << 32:
            raise TransportError(
                "the RDMA connection has used all window numbers; open a new connection"
            )
        departure = OutgoingWindow(self._numbers, head, window)
        self._numbers += 1
        self._queue.append(departure)
        return departure

    def drop(self, transfer: int) -> None:
        """Send no more of a KV transfer: drop what is queued.

        What is being written already ends as STALE, that is, useless.
        """
        self.withdraw(transfer)
        remaining: deque[OutgoingWindow] = deque()
        for departure in self._queue:
            departure.is_dropped = departure.head.transfer == transfer and departure.writes is None
            if not departure.is_dropped:
                remaining.append(departure)
        self._queue = remaining
        for departure in self._in_flight.values():
            if departure.head.transfer == transfer:
                departure.verdict = WindowVerdict.STALE

    def post(self, pair: QueuePairWriter, epoch: int) -> bool:
        """Pass as many writes to the RDMA device as it accepts; return whether any was."""
        posted = False
        while self._queue:
            departure = self._queue[0]
            if departure.writes is None and len(self._in_flight) >= MOST_WINDOWS:
                break
            if departure.writes is not None or self._begin(departure):
                posted = self._post(departure, pair, epoch) or posted
                if departure.next < len(departure.writes or ()):
                    break
            self._queue.popleft()
        return posted

    def on_completion(self) -> None:
        """Record that the device has completed a write request, and so all earlier ones."""
        count, departure = self._signalled.popleft()
        self._free += count
        if departure is not None:
            if departure.verdict is None:
                departure.verdict = (
                    WindowVerdict.OK if departure.is_current() else WindowVerdict.STALE
                )
            self._end(departure)

    def on_refused(self, number: int) -> None:
        """Mark a unit of KV (window) as useless, because the receiver has stopped its transfer."""
        departure = self._in_flight.get(number)
        if departure is not None:
            departure.verdict = WindowVerdict.STALE
            self.withdraw(departure.head.transfer)

    def restart(self) -> None:
        """Write all KV that is in flight again, because the connection was renewed."""
        self._signalled.clear()
        self._free, self._unsignalled = MOST_WRITES, 0
        in_flight = list(self._in_flight.values())
        not_begun = [departure for departure in self._queue if departure.writes is None]
        self._queue = deque()
        for departure in in_flight:
            departure.next = 0
            if departure.verdict is not None or departure.head.transfer not in self._grants:
                departure.verdict = WindowVerdict.STALE
                self._end(departure)
            else:
                self._queue.append(departure)
        self._queue.extend(not_begun)

    def _begin(self, departure: OutgoingWindow) -> bool:
        # Prepare the writes of a window of KV; if it must not be written, end it and return False.
        head, window = departure.head, departure.window
        grant = self._grants.get(head.transfer)
        departure.writes = []
        if grant is None or not departure.is_current():
            departure.verdict = WindowVerdict.STALE
        else:
            departure.at = grant.claim(head.n_bytes)
            try:
                departure.writes = grant.writes(
                    window.runs, window.dst_rank, departure.at, self._gather
                )
            except TransportError:
                departure.verdict = WindowVerdict.STALE
        if departure.verdict is not None:
            self._end(departure)
            return False
        if self._checksums:
            departure.digest = digest_of(window.region, window.runs.src, window.runs.length)
        self._in_flight[departure.number] = departure
        return True

    def _post(self, departure: OutgoingWindow, pair: QueuePairWriter, epoch: int) -> bool:
        # Post the writes of a window of KV as far as possible; return whether any was posted.
        #
        # The last write carries the window's number.
        writes = departure.writes or []
        region = departure.window.region
        key, first_write = self._key_of(region), departure.next
        while departure.next < len(writes) and self._free:
            write = writes[departure.next]
            departure.next += 1
            self._free -= 1
            self._unsignalled += 1
            last = departure.next == len(writes)
            signalled = last or self._unsignalled == _SIGNAL_EVERY or not self._free
            pieces = [LocalRange(region.address + src, length, key) for src, length in write.pieces]
            immediate = departure.number if last else None
            pair.write(
                epoch << 32 | departure.number,
                pieces,
                (write.address, write.key),
                signalled=signalled,
                immediate=immediate,
            )
            if signalled:
                self._signalled.append((self._unsignalled, departure if last else None))
                self._unsignalled = 0
        return departure.next > first_write

    def _end(self, departure: OutgoingWindow) -> None:
        self._in_flight.pop(departure.number, None)
        departure.is_done = True
        self._ended(departure)
