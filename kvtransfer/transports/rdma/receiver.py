"""The receiving side of an RDMA connection: which memory may be written, and what has arrived.

A unit of KV (window) is complete when two things have arrived, in either order. One is its last
write, which carries the window's number. The other is a message over TCP, its trailer, which has
the checksum. link.py creates and ends queue pairs. No I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtransfer.layout.memory_regions import Blocks, Region
from kvtransfer.transport_interface import TransportError, WindowSlice, WindowVerdict
from kvtransfer.transports.rdma.control import RdmaTrailer
from kvtransfer.transports.rdma.memory_grants import GrantedMemory, Registry

_MAX_INCOMPLETE = 1024


class RdmaReceiver:
    """Which memory another agent may write to over one RDMA connection, and what has arrived.

    A grant is such a permission, for one transfer. It may be made on any thread; all other methods
    must be called on one thread. A grant is None while a thread registers its memory, without a
    lock.
    """

    def __init__(self, registry: Registry, most_keys: int) -> None:
        self._registry = registry
        self._most_keys = most_keys
        self._lock = threading.Condition()
        self._openings: dict[int, GrantedMemory | None] = {}
        self._fenced_early: set[int] = set()
        self._closed = False
        self._written: set[int] = set()
        self._waiting: dict[int, RdmaTrailer] = {}
        self._newest = -1

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """Register the memory of these blocks, and return the keys with which the source may write.

        Returns b"" if the device refuses, or after the transfer's fence or `close`. Without keys,
        the source cannot write.
        """
        with self._lock:
            if self._closed or transfer in self._openings or transfer in self._fenced_early:
                self._fenced_early.discard(transfer)
                return b""
            self._openings[transfer] = None
        opening: GrantedMemory | None = None
        try:
            opening = GrantedMemory(self._registry, regions, blocks, self._most_keys)
        finally:
            with self._lock:
                if opening is None:
                    del self._openings[transfer]
                else:
                    self._openings[transfer] = opening
                self._lock.notify_all()
        return opening.grant

    def fence(self, transfer: int) -> bool:
        """Stop all RDMA writes of a transfer, before its blocks are returned to the engine.

        Returns False while its memory is still being registered; call again then. Raises
        TransportError if the device cannot end the registration. The source can then write until
        its queue pair is closed.
        """
        with self._lock:
            opening = self._openings.get(transfer)
            if opening is None:
                under_way = transfer in self._openings
                if not under_way:
                    self._fenced_early.add(transfer)
                return not under_way
        opening.close()
        with self._lock:
            del self._openings[transfer]
        return True

    def close(self) -> None:
        """Stop all RDMA writes of all transfers, and permit no more.

        Raises TransportError if memory stays registered.
        """
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: None not in self._openings.values())
            openings, self._openings = self._openings, {}
        error: TransportError | None = None
        for opening in openings.values():
            try:
                assert opening is not None
                opening.close()
            except TransportError as failure:
                error = failure
        if error is not None:
            raise error

    def on_written(self, number: int) -> RdmaTrailer | None:
        """Record that the last write of a window (unit of KV) with this number has arrived.

        Returns the window's trailer (checksum message) if the window is now complete, else None.
        """
        trailer = self._waiting.pop(number, None)
        if trailer is None and number > self._newest:
            self._written.add(number)
        self._check_incomplete()
        return trailer

    def on_trailer(self, trailer: RdmaTrailer) -> RdmaTrailer | None:
        """Record a window's trailer, the message over TCP that has the window's checksum.

        Returns the trailer if the window is now complete, else None. Numbers only grow, so all
        windows with lower numbers have ended.
        """
        self._newest = max(self._newest, trailer.number)
        complete = trailer.number in self._written or trailer.verdict is not WindowVerdict.OK
        self._written = {number for number in self._written if number > self._newest}
        if complete:
            return trailer
        self._waiting[trailer.number] = trailer
        self._check_incomplete()
        return None

    def _check_incomplete(self) -> None:
        # Raise TransportError for too many incomplete windows of KV; an honest source has only a
        # few.
        if len(self._written) + len(self._waiting) > _MAX_INCOMPLETE:
            raise TransportError(
                f"more than {_MAX_INCOMPLETE} windows (pieces of KV) are incomplete, which "
                "the protocol forbids"
            )

    def is_granted(self, transfer: int) -> bool:
        """Return whether the other agent may write to the blocks of this transfer."""
        with self._lock:
            return transfer in self._openings

    def verify(self, trailer: RdmaTrailer, window: WindowSlice) -> WindowVerdict:
        """Return whether a unit of KV (window) that has arrived completely is intact.

        Bytes in the staging buffer are copied to their place first.
        """
        if trailer.verdict is not WindowVerdict.OK:
            return trailer.verdict
        with self._lock:
            opening = self._openings.get(trailer.head.transfer)
        if opening is None or window.runs.n_bytes != trailer.head.n_bytes:
            return WindowVerdict.CORRUPT
        intact = opening.check_arrival(window.runs, window.region, trailer.at, trailer.digest)
        return WindowVerdict.OK if intact else WindowVerdict.CORRUPT
