"""Scatter: pieces of memory that a stream is written from or read into without a copy. Addresses live here alone.

Iovecs are rows of one numpy array, so a window of a thousand pieces costs no Python object per piece; libc's readv and
writev take them as they are, with the interpreter's lock released. Not here: which pieces, or what they are for.
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

from kvtransfer.regions import Region
from kvtransfer.transports.base import TransportError

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Stretch = tuple[int, int]  # address and length

NOTHING: Stretch = (0, 0)
MOST_IOVECS = 64  # per call: the kernel takes in all of them again after every short read
_WOULD_BLOCK = (errno.EAGAIN, errno.EINTR)


def _vector_call(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function


readv = _vector_call("readv")
writev = _vector_call("writev")


def transferred(count: int) -> int | None:
    """What readv or writev has returned: None when it would have waited. Raises OSError."""
    if count >= 0:
        return count
    number = ctypes.get_errno()
    if number in _WOULD_BLOCK:
        return None
    raise OSError(number, os.strerror(number))


class Pieces:
    """`size` bytes of memory in pieces, of which the first `done` have been written or read.

    Row 0 of the iovecs is the caller's, for what goes ahead of the pieces in the same call, and so is the last one, for
    what follows. `fed` counts the pieces that were given to a digest.
    """

    __slots__ = ("_ends", "_lengths", "_memory", "_offsets", "_row", "_rows", "_words", "done", "fed", "size")

    def __init__(self, memory: Bytes, address: int, offsets: Offsets, lengths: Offsets) -> None:
        self._memory = memory
        self._offsets: list[int] = offsets.tolist()
        self._lengths: list[int] = lengths.tolist()
        self._ends: list[int] = lengths.cumsum().tolist()
        self.size = self._ends[-1] if self._ends else 0
        self.done = 0
        self.fed = 0
        rows = np.empty((len(lengths) + 2, 2), np.int64)
        rows[1:-1, 0] = offsets
        rows[1:-1, 0] += address
        rows[1:-1, 1] = lengths
        self._rows: int = rows.__array_interface__["data"][0]
        self._words = rows.data.cast("B").cast("q")
        self._row = 1

    @classmethod
    def of_window(cls, region: Region, offsets: Offsets, lengths: Offsets) -> Pieces:
        """A window's pieces of a region. TransportError if one of them lies outside."""
        if not len(lengths) or int(offsets.min()) < 0 or int(lengths.min()) < 1:
            raise TransportError("a window of nothing, or before the region's begin")
        if int((offsets + lengths).max()) > region.bytes.size:
            raise TransportError(f"a window reaches beyond the {region.bytes.size} bytes of {region.name}")
        return cls(region.bytes, region.address, offsets, lengths)

    @classmethod
    def of_buffer(cls, buffer: bytes | bytearray | Bytes) -> Pieces:
        """One piece: all of `buffer`."""
        return cls.over(np.frombuffer(buffer, np.uint8), len(buffer))

    @classmethod
    def over(cls, scratch: Bytes, size: int) -> Pieces:
        """`size` bytes that all lie in `scratch`, one piece upon the other: for bytes that do not matter."""
        count = -(-size // scratch.size)
        lengths = np.full(count, scratch.size, np.int64)
        if count:
            lengths[-1] = size - (count - 1) * scratch.size
        return cls(scratch, address_of(scratch), np.zeros(count, np.int64), lengths)

    @property
    def left(self) -> int:
        return self.size - self.done

    @property
    def count(self) -> int:
        return len(self._ends)

    def call(self, function: Any, fd: int, ahead: Stretch, behind: Stretch, pieces: int) -> int | None:
        """readv or writev: `ahead` (before the first piece alone), pieces up to number `pieces`, `behind` once all are
        in. Bytes moved, None where it would wait. Raises OSError."""
        first, last = self._row, min(pieces + 1, self._row + MOST_IOVECS)
        if ahead[1]:
            first -= 1
            self._words[2 * first], self._words[2 * first + 1] = ahead
        if behind[1] and last == len(self._ends) + 1:
            self._words[2 * last], self._words[2 * last + 1] = behind
            last += 1
        return transferred(function(fd, self._rows + 16 * first, last - first))

    def advance(self, count: int) -> None:
        """So many more bytes are done."""
        self.done = done = self.done + count
        row = bisect_right(self._ends, done)
        if row < len(self._ends):
            left = self._ends[row] - done
            at = 2 * row + 2
            self._words[at] += self._words[at + 1] - left
            self._words[at + 1] = left
        self._row = row + 1

    def feed(self, update: Callable[[memoryview], object], upto: int) -> None:
        """Give a digest the pieces not yet given that end at byte `upto` or before, in order."""
        last = bisect_right(self._ends, upto)
        if last > self.fed:
            memory = self._memory.data
            for start, length in zip(self._offsets[self.fed : last], self._lengths[self.fed : last], strict=True):
                update(memory[start : start + length])
            self.fed = last

    def feed_ahead(self, update: Callable[[memoryview], object], most: int) -> None:
        """Feed the next `most` bytes, and one piece at least, when all that was fed is done."""
        if self._row > self.fed:
            self.feed(update, max(self.done + most, self._ends[self.fed]))

    def feed_when(self, update: Callable[[memoryview], object], most: int) -> None:
        """Feed what is done, once that is `most` bytes or everything."""
        if not self.left or self.done - (self._ends[self.fed - 1] if self.fed else 0) >= most:
            self.feed(update, self.done)

    def put(self, data: memoryview) -> None:
        """Copy into the pieces, from byte `done` on, without counting them as done."""
        row, done = self._row - 1, self.done
        memory, taken = self._memory.data, 0
        while taken < len(data):
            left = self._ends[row] - done - taken
            count = min(left, len(data) - taken)
            start = self._offsets[row] + self._lengths[row] - left
            memory[start : start + count] = data[taken : taken + count]
            taken += count
            row += 1


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
