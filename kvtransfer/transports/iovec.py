"""Reads from a socket directly into many pieces of memory, or writes them, in one system call.

The pieces are iovecs, pairs of address and length, which are rows of a numpy array. So a transfer
of a thousand pieces needs no Python object for each. The C functions readv and writev use the rows
directly, and release the interpreter lock. Only this module handles addresses.

The main class is MemoryPieces.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import TransportError
from kvtransfer.transports.copy_runs import are_within
from kvtransfer.transports.pump import Digest, PumpCalls

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Stretch = tuple[int, int]  # address and length

NOTHING: Stretch = (0, 0)
MOST_IOVECS = 64  # maximum per call, since the kernel copies all of them again after a short read
# Maximum bytes per call that are digested: so many are still in the core's cache afterwards.
IN_CACHE = 512 << 10
_WOULD_BLOCK = (errno.EAGAIN, errno.EINTR)


def _vector_call(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function


readv = _vector_call("readv")
writev = _vector_call("writev")


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view.restype = ctypes.py_object
_PYBUF_WRITE = 0x200


def vectors_at(address: int, count: int) -> list[memoryview]:
    """Return memoryviews of the pieces of memory that the iovecs at `address` describe.

    count  number of iovecs (address, length) in the table

    The views do not keep the memory alive.
    """
    words = _view(address, 16 * count, _PYBUF_WRITE).cast("q").tolist()
    return [
        _view(start, length, _PYBUF_WRITE)
        for start, length in zip(words[::2], words[1::2], strict=True)
    ]


def check_result(count: int) -> int | None:
    """Return the number of bytes moved by readv or writev, or None if the call would block.

    Raises OSError if the call failed for another reason.
    """
    if count >= 0:
        return count
    number = ctypes.get_errno()
    if number in _WOULD_BLOCK:
        return None
    raise OSError(number, os.strerror(number))


class Iovecs:
    """A table of addresses and lengths (iovecs) for system calls that move many pieces of memory.

    The memory of the table is reused for every transfer.
    """

    __slots__ = ("_rows", "address", "words")

    def __init__(self) -> None:
        self._allocate(MOST_IOVECS)

    def _allocate(self, count: int) -> None:
        self._rows = np.empty((count + 2, 2), np.int64)
        self.words = self._rows.data.cast("B").cast("q")
        self.address = int(self._rows.__array_interface__["data"][0])

    def fill(self, address: int, offsets: Offsets, lengths: Offsets) -> None:
        """Fill rows 1 to n of the table of iovecs with these n pieces of memory.

        Rows 0 and n + 1 stay free for a prefix and a suffix.
        """
        count = len(lengths)
        if count + 2 > len(self._rows):
            self._allocate(count)
        np.add(offsets, address, out=self._rows[1 : count + 1, 0])
        self._rows[1 : count + 1, 1] = lengths


class MemoryPieces:
    """Pieces of memory to send from or receive into, and the number of bytes moved so far.

    They have `size` bytes together, of which the first `done` bytes have been moved.

    fed_count  number of pieces that are already part of the digest (running checksum)
    was_short  whether the last call moved fewer bytes than requested, because the socket is empty
               or full

    Only one object may use a table `iovecs` at a time.
    """

    __slots__ = (
        "_call_bytes",
        "_ends",
        "_iovecs",
        "_lengths",
        "_memory",
        "_offsets",
        "_row",
        "done",
        "fed_count",
        "size",
        "was_short",
    )  # fmt: skip

    def __init__(
        self, memory: Bytes, address: int, offsets: Offsets, lengths: Offsets, iovecs: Iovecs
    ) -> None:
        self._memory = memory
        self._offsets, self._lengths = offsets, lengths
        self._iovecs = iovecs
        self.done = self.fed_count = 0
        self.was_short = False
        self._row = 1
        self._call_bytes: int | None = None  # limit of a call whose bytes a digest consumes
        if len(lengths) == 1:
            self.size = size = lengths.item()
            self._ends = [size]
            words = iovecs.words
            words[2], words[3] = address + offsets.item(), size
        else:
            self._ends = np.add.accumulate(lengths).tolist()
            self.size = self._ends[-1] if self._ends else 0
            iovecs.fill(address, offsets, lengths)

    @classmethod
    def of_window(
        cls,
        region: Region,
        offsets: Offsets,
        lengths: Offsets,
        iovecs: Iovecs,
        *,
        fed: bool = False,
    ) -> MemoryPieces:
        """Return the pieces of memory of one unit of KV (window), which is to be sent or received.

        fed  whether a digest (running checksum) consumes the pieces. Each call then moves at most
             as many bytes as fit into the processor's cache, where the digest finds them

        Raises TransportError if a piece lies outside the region.
        """
        if not are_within(region, offsets, lengths):
            raise TransportError(
                f"a window (piece of KV) is empty or does not lie within the {region.bytes.size} "
                f"bytes of the region {region.name}"
            )
        pieces = cls(region.bytes, region.address, offsets, lengths, iovecs)
        if fed and pieces.size > IN_CACHE:
            if int(np.maximum.reduce(lengths)) > IN_CACHE:
                pieces = cls(
                    region.bytes, region.address, *_split_long(offsets, lengths, IN_CACHE), iovecs
                )
            pieces._call_bytes = IN_CACHE
        return pieces

    @classmethod
    def of_buffer(cls, buffer: bytes | bytearray | memoryview, iovecs: Iovecs) -> MemoryPieces:
        return cls.over(np.frombuffer(buffer, np.uint8), len(buffer), iovecs)

    @classmethod
    def over(cls, scratch: Bytes, size: int, iovecs: Iovecs) -> MemoryPieces:
        """Return pieces of `size` bytes together, into which a socket's bytes are discarded.

        All pieces are the same buffer `scratch`.
        """
        count = -(-size // scratch.size) if size else 0
        lengths = np.full(count, scratch.size, np.int64)
        if count:
            lengths[-1] = size - (count - 1) * scratch.size
        return cls(scratch, address_of(scratch), np.zeros(count, np.int64), lengths, iovecs)

    @classmethod
    def in_order(cls, buffer: Bytes, most: int, iovecs: Iovecs) -> MemoryPieces:
        """Divide `buffer` into pieces of at most `most` bytes, for a running checksum."""
        offsets, lengths = _split_long(np.zeros(1, np.int64), np.array([buffer.size]), most)
        return cls(buffer, address_of(buffer), offsets, lengths, iovecs)

    @property
    def remaining(self) -> int:
        """Return the number of bytes that have not been moved yet."""
        return self.size - self.done

    @property
    def count(self) -> int:
        return len(self._ends)

    @property
    def table(self) -> Iovecs:
        return self._iovecs

    def rows(self) -> tuple[int, int]:
        """Return (address, number of rows) of the table of the pieces that are left to move.

        The rows before and after them are free.
        """
        return self._iovecs.address + 16 * self._row, len(self._ends) + 1 - self._row

    def call(self, function: Any, fd: int, ahead: Stretch, behind: Stretch) -> int | None:
        """Call readv or writev for as many pieces as possible, and return the number of bytes
        moved.

        function  readv or writev
        ahead     memory to move before the first piece
        behind    memory to move after the last piece

        Returns None if the call would block. Raises OSError.
        """
        first, last = self._row, min(len(self._ends) + 1, self._row + MOST_IOVECS)
        if self._call_bytes is not None:
            last = min(last, max(first, bisect_right(self._ends, self.done + self._call_bytes)) + 1)
        requested = (self._ends[last - 2] if last > 1 else 0) - self.done + ahead[1]
        if last <= len(self._ends):
            behind = NOTHING
        first, last = self._add_rows(first, last, ahead, behind)
        count = check_result(function(fd, self._iovecs.address + 16 * first, last - first))
        self.was_short = count is None or count < requested + behind[1]
        return count

    def move(
        self,
        calls: PumpCalls,
        ahead: Stretch,
        behind: Stretch,
        optional: int,
        digest: Digest | None,
    ) -> int | None:
        """Move all remaining pieces by the native pump (C code), which adds them to the checksum
        `digest`.

        ahead     memory to move before the first piece
        behind    memory to move after the last piece
        optional  number of bytes at the end of `behind` for which the pump does not wait

        Returns the number of bytes moved, including `ahead` and `behind`, or None if the call would
        block. Raises OSError.
        """
        first, last = self._add_rows(self._row, len(self._ends) + 1, ahead, behind)
        total = ahead[1] + self.remaining + behind[1]
        calls.is_waiting = True
        try:
            count, calls.was_stopped = calls.pump.move(
                calls.fd,
                calls.stop_fd,
                calls.is_writing,
                self._iovecs.address + 16 * first,
                last - first,
                total,
                ahead[1],
                behind[1],
                optional,
                0 if digest is None else digest.update_address,
                0 if digest is None else digest.state_address,
                calls.patience_ms if calls.may_wait() else 0,
                calls.spin_us,
            )
        finally:
            calls.is_waiting = False
        self.was_short = count < total - behind[1]
        return None if count < 0 else count

    def _add_rows(self, first: int, last: int, ahead: Stretch, behind: Stretch) -> tuple[int, int]:
        # Put `ahead` before row `first` and `behind` at row `last`, unless they are empty.
        #
        # Returns the first row and the row after the last.
        words = self._iovecs.words
        if ahead[1]:
            first -= 1
            words[2 * first], words[2 * first + 1] = ahead
        if behind[1]:
            words[2 * last], words[2 * last + 1] = behind
            last += 1
        return first, last

    def advance(self, count: int) -> None:
        """Count `count` more bytes of these pieces of memory as moved."""
        self.done = done = self.done + count
        row = bisect_right(self._ends, done)
        if row < len(self._ends):
            left = self._ends[row] - done
            words, index = self._iovecs.words, 2 * row + 2
            words[index] += words[index + 1] - left
            words[index + 1] = left
        self._row = row + 1

    def feed(self, update: Callable[[memoryview], object], end: int) -> None:
        """Add the pieces of memory that end at byte `end` or before to a checksum, by calls of
        `update`.

        Each piece is added once, in order.
        """
        last = bisect_right(self._ends, end)
        if last > self.fed_count:
            for part in self.parts(self.fed_count, last):
                update(part)
            self.fed_count = last

    @property
    def unfed_bytes(self) -> int:
        """Return how many bytes were moved, but are not yet part of the checksum."""
        return self.done - (self._ends[self.fed_count - 1] if self.fed_count else 0)

    def parts(self, first: int = 0, last: int | None = None) -> list[memoryview]:
        """Return memoryviews of the pieces of memory from `first` to `last` - 1, or to the end if
        None.
        """
        memory = self._memory.data
        starts, lengths = self._offsets[first:last].tolist(), self._lengths[first:last].tolist()
        return [
            memory[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]

    def gather(self, into: memoryview) -> None:
        """Copy all pieces of memory in order to the start of the buffer `into`."""
        if len(self._ends) == 1:
            start = self._offsets.item()
            into[: self.size] = self._memory.data[start : start + self.size]
            return
        offset = 0
        for part in self.parts():
            into[offset : offset + len(part)] = part
            offset += len(part)

    def put(self, data: memoryview) -> None:
        """Copy `data` into the pieces of memory from byte `done` on, without counting it as
        moved.
        """
        row, done = self._row - 1, self.done
        memory, taken = self._memory.data, 0
        while taken < len(data):
            left = self._ends[row] - done - taken
            count = min(left, len(data) - taken)
            start = int(self._offsets[row] + self._lengths[row]) - left
            memory[start : start + count] = data[taken : taken + count]
            taken += count
            row += 1


def _split_long(offsets: Offsets, lengths: Offsets, most: int) -> tuple[Offsets, Offsets]:
    counts = -(-lengths // most)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.repeat(-(-lengths // counts), counts)
    cut = np.repeat(offsets, counts) + (np.arange(parts.size) - begins) * parts
    return cut, np.minimum(np.repeat(offsets + lengths, counts) - cut, parts)


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
