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
    """All grants and incoming windows of one link. Grants may be given by any thread, the rest is one thread's."""

    def __init__(self, registry: Registry, most_keys: int) -> None:
        self._registry = registry
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._openings: dict[int, Opening | None] = {}
        self._closed = False
        self._written: set[int] = set()
        self._waiting: dict[int, Trailer] = {}
        self._newest = -1

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """The keys. Empty when the device registers no more, or after `close`: the source then can write nothing."""
        with self._lock:
            if self._closed or transfer in self._openings:
                return b""
            try:
                opening = Opening(self._registry, regions, blocks, self._most_keys)
            except TransportError:
                self._openings[transfer] = None
                return b""
            self._openings[transfer] = opening
            return opening.grant

    def fence(self, transfer: int) -> None:
        """Nobody writes there any more once this returns."""
        with self._lock:
            opening = self._openings.pop(transfer, None)
        if opening is not None:
            opening.close()

    def close(self) -> None:
        """Fence everything, and grant nothing more."""
        with self._lock:
            self._closed = True
            openings = list(self._openings.values())
            self._openings.clear()
        for opening in openings:
            if opening is not None:
                opening.close()

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
