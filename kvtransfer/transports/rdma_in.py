"""The sink's half of an RDMA link: what peers may write, and windows that have come in. No thread, no socket.

A window is complete when two things are there, in either order: its number, which came with the last write, and its
trailer, which came over the side channel. Not here: the queue pair's life (rdma_link.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtransfer.regions import Blocks, Region
from kvtransfer.transports.base import Slice, TransportError, Verdict
from kvtransfer.transports.rdma_grants import Opening, Registry
from kvtransfer.transports.rdma_side import Trailer

_MOST_HALVES = 1024


class Arrivals:
    """All grants and incoming windows of one link. Grants may be given by any thread, the rest is one thread's.

    A grant is None while a thread is at registering it, and no lock is held meanwhile.
    """

    def __init__(self, registry: Registry, most_keys: int) -> None:
        self._registry = registry
        self._most_keys = most_keys
        self._lock = threading.Condition()
        self._openings: dict[int, Opening | None] = {}
        self._too_late: set[int] = set()
        self._closed = False
        self._written: set[int] = set()
        self._waiting: dict[int, Trailer] = {}
        self._newest = -1

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """The keys. Empty when the device registers no more, and after the transfer's fence or `close`: the source then
        can write nothing."""
        with self._lock:
            if self._closed or transfer in self._openings or transfer in self._too_late:
                self._too_late.discard(transfer)
                return b""
            self._openings[transfer] = None
        opening: Opening | None = None
        try:
            opening = Opening(self._registry, regions, blocks, self._most_keys)
        finally:
            with self._lock:
                if opening is None:
                    del self._openings[transfer]
                else:
                    self._openings[transfer] = opening
                self._lock.notify_all()
        return opening.grant

    def fence(self, transfer: int) -> bool:
        """Nobody writes there any more if this is True. False: it is being granted just now; ask again after that.

        TransportError: the device does not let go of the memory. Then a peer can write there as long as it has a queue
        pair to do it with.
        """
        with self._lock:
            opening = self._openings.get(transfer)
            if opening is None:
                under_way = transfer in self._openings
                if not under_way:
                    self._too_late.add(transfer)
                return not under_way
        opening.close()
        with self._lock:
            del self._openings[transfer]
        return True

    def close(self) -> None:
        """Fence everything, and grant nothing more. TransportError if some memory stays registered."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: None not in self._openings.values())
            openings, self._openings = self._openings, {}
        wrong: TransportError | None = None
        for opening in openings.values():
            try:
                assert opening is not None
                opening.close()
            except TransportError as failed:
                wrong = failed
        if wrong is not None:
            raise wrong

    def written(self, number: int) -> Trailer | None:
        """The last write of a window has arrived. Its trailer, if the window is complete with that."""
        trailer = self._waiting.pop(number, None)
        if trailer is None and number > self._newest:
            self._written.add(number)
        self._check()
        return trailer

    def told(self, trailer: Trailer) -> Trailer | None:
        """A trailer has come. The same, if the window is complete with that. Numbers rise: what is older is over."""
        self._newest = max(self._newest, trailer.number)
        complete = trailer.number in self._written or trailer.verdict is not Verdict.OK
        self._written = {number for number in self._written if number > self._newest}
        if complete:
            return trailer
        self._waiting[trailer.number] = trailer
        self._check()
        return None

    def _check(self) -> None:
        """A source has a few windows under way; one that says otherwise would have us remember without end."""
        if len(self._written) + len(self._waiting) > _MOST_HALVES:
            raise TransportError(f"more than {_MOST_HALVES} windows have arrived by half")

    def expected(self, transfer: int) -> bool:
        with self._lock:
            return transfer in self._openings

    def verdict(self, trailer: Trailer, window: Slice) -> Verdict:
        """What to make of a complete window; staged bytes are in their place after this."""
        if trailer.verdict is not Verdict.OK:
            return trailer.verdict
        with self._lock:
            opening = self._openings.get(trailer.head.transfer)
        if opening is None or window.runs.n_bytes != trailer.head.n_bytes:
            return Verdict.CORRUPT
        intact = opening.landed(window.runs, window.region, trailer.at, trailer.digest)
        return Verdict.OK if intact else Verdict.CORRUPT
