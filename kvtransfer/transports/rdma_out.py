"""The source's half of an RDMA link: windows on their way out, in work requests of a queue pair. No thread, no socket.

A window is read by the device some time between its posting and its completion; the verdict is found after that.
Not here: the queue pair's life, or how the verdict travels (rdma_link.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtransfer.regions import Region
from kvtransfer.transports.base import Slice, TransportError, Verdict, WindowHead
from kvtransfer.transports.rdma_grants import Grant, Write, digest_of
from kvtransfer.transports.verbs import Piece

MOST_WRITES = 256
MOST_WINDOWS = 16
_TELL_EVERY = 64


class Writer(Protocol):
    """A queue pair, as far as it matters here (verbs.QueuePair)."""

    def write(
        self,
        number: int,
        pieces: list[Piece],
        target: tuple[int, int],
        *,
        tell: bool,
        immediate: int | None = None,
    ) -> None: ...


class Departure:
    """A window on its way out. `writes` is None until it has begun, `verdict` while nothing speaks against it."""

    __slots__ = (
        "at",
        "digest",
        "done",
        "forgotten",
        "head",
        "next",
        "number",
        "verdict",
        "window",
        "writes",
    )

    def __init__(self, number: int, head: WindowHead, window: Slice) -> None:
        self.number = number
        self.head = head
        self.window = window
        self.writes: list[Write] | None = None
        self.next = 0
        self.at: int | None = None
        self.digest: int | None = None
        self.verdict: Verdict | None = None
        self.done = False
        self.forgotten = False

    def current(self) -> bool:
        return self.window.current is None or self.window.current()


class Departures:
    """All windows of one link. `ended` is called once for each that has begun, when its memory is read no more."""

    def __init__(
        self,
        key_of: Callable[[Region], int],
        ended: Callable[[Departure], None],
        *,
        gather: int,
        checksums: bool,
    ) -> None:
        self._key_of, self._ended, self._gather, self._checksums = key_of, ended, gather, checksums
        self._grants: dict[int, Grant] = {}
        self._numbers = 0
        self._queue: deque[Departure] = deque()
        self._flying: dict[int, Departure] = {}
        self._free = MOST_WRITES
        self._untold = 0
        self._told: deque[tuple[int, Departure | None]] = deque()

    def accept(self, transfer: int, grant: bytes) -> None:
        """Raises TransportError for bytes that are no grant."""
        self._grants[transfer] = Grant(grant)

    def withdraw(self, transfer: int) -> None:
        """The sink has taken its grant back: nothing more may be written."""
        self._grants.pop(transfer, None)

    def put(self, head: WindowHead, window: Slice) -> Departure:
        """Raises TransportError when the link has used up its numbers (4 billion windows)."""
        if self._numbers >= 1 << 32:
            raise TransportError("this link has no numbers left for windows")
        departure = Departure(self._numbers, head, window)
        self._numbers += 1
        self._queue.append(departure)
        return departure

    def drop(self, transfer: int) -> None:
        self.withdraw(transfer)
        kept: deque[Departure] = deque()
        for departure in self._queue:
            departure.forgotten = departure.head.transfer == transfer and departure.writes is None
            if not departure.forgotten:
                kept.append(departure)
        self._queue = kept
        for departure in self._flying.values():
            if departure.head.transfer == transfer:
                departure.verdict = Verdict.STALE

    def post(self, pair: Writer, epoch: int) -> bool:
        """Hand to the device what it has room for; whether there was anything."""
        posted = False
        while self._queue:
            departure = self._queue[0]
            if departure.writes is None and len(self._flying) >= MOST_WINDOWS:
                break
            if departure.writes is not None or self._begin(departure):
                posted = self._post(departure, pair, epoch) or posted
                if departure.next < len(departure.writes or ()):
                    break
            self._queue.popleft()
        return posted

    def complete(self) -> None:
        """The next write that was to be told has been done, and all before it."""
        count, departure = self._told.popleft()
        self._free += count
        if departure is not None:
            if departure.verdict is None:
                departure.verdict = Verdict.OK if departure.current() else Verdict.STALE
            self._end(departure)

    def refuse(self, number: int) -> None:
        """The sink's device has turned this window down: its transfer is fenced there."""
        departure = self._flying.get(number)
        if departure is not None:
            departure.verdict = Verdict.STALE
            self.withdraw(departure.head.transfer)

    def again(self) -> None:
        """The queue pair is gone, and with it what was under way: a new one writes it again, from the first byte."""
        self._told.clear()
        self._free, self._untold = MOST_WRITES, 0
        flying, fresh = (
            list(self._flying.values()),
            [one for one in self._queue if one.writes is None],
        )
        self._queue = deque()
        for departure in flying:
            departure.next = 0
            if departure.verdict is not None or departure.head.transfer not in self._grants:
                departure.verdict = Verdict.STALE
                self._end(departure)
            else:
                self._queue.append(departure)
        self._queue.extend(fresh)

    def _begin(self, departure: Departure) -> bool:
        """Look at the window for the first time: whether it is to be written. If not, it has ended."""
        head, window = departure.head, departure.window
        grant = self._grants.get(head.transfer)
        departure.writes = []
        if grant is None or not departure.current():
            departure.verdict = Verdict.STALE
        else:
            departure.at = grant.claim(head.n_bytes)
            try:
                departure.writes = grant.writes(
                    window.runs, window.dst_rank, departure.at, self._gather
                )
            except TransportError:
                departure.verdict = Verdict.STALE
        if departure.verdict is not None:
            self._end(departure)
            return False
        if self._checksums:
            departure.digest = digest_of(window.region, window.runs.src, window.runs.length)
        self._flying[departure.number] = departure
        return True

    def _post(self, departure: Departure, pair: Writer, epoch: int) -> bool:
        """Post what there is room for. The last write carries the number that the sink waits for."""
        writes = departure.writes or []
        region = departure.window.region
        key, began = self._key_of(region), departure.next
        while departure.next < len(writes) and self._free:
            write = writes[departure.next]
            departure.next += 1
            self._free -= 1
            self._untold += 1
            last = departure.next == len(writes)
            tell = last or self._untold == _TELL_EVERY or not self._free
            pieces = [Piece(region.address + src, length, key) for src, length in write.pieces]
            immediate = departure.number if last else None
            pair.write(
                epoch << 32 | departure.number,
                pieces,
                (write.address, write.key),
                tell=tell,
                immediate=immediate,
            )
            if tell:
                self._told.append((self._untold, departure if last else None))
                self._untold = 0
        return departure.next > began

    def _end(self, departure: Departure) -> None:
        self._flying.pop(departure.number, None)
        departure.done = True
        self._ended(departure)
