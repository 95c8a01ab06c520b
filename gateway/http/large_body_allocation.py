"""Allocates and frees large request bodies without blocking the event loop.

To grow a buffer to 30 MiB can take 8 ms, because the heap copies it. To free it at once takes 4 to
8 ms, because the kernel takes the pages back one by one. So a body gets its full size from the
start, and its pages are freed in steps.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from sys import getrefcount

FREED_AT_ONCE = 1024 * 1024  # bytes freed per step, which takes about a quarter of a millisecond
CHECK_S = 0.05  # seconds between two checks whether bodies are still in use
_HEADER = bytes.__basicsize__ - 1  # bytes of a bytes object before its first byte
_UNUSED = 2  # references to a body that only `_bodies` and the argument of getrefcount() hold

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def new_body(size: int) -> bytes:
    """Return a body of `size` >= 2 undefined bytes, for the caller to fill with write_piece()."""
    body: bytes = _new_bytes(None, size)
    return body


def write_piece(body: bytes, offset: int, piece: bytes) -> None:
    """Write `piece` at `offset` into a body from new_body() that no other code uses yet.

    Raises ValueError if the piece exceeds the body.
    """
    if not 0 <= offset <= len(body) - len(piece):
        raise ValueError(
            f"a piece of {len(piece)} bytes at offset {offset} does not lie within a body of "
            f"{len(body)} bytes"
        )
    ctypes.memmove(id(body) + _HEADER + offset, piece, len(piece))


class BodyMemory:
    """Frees large request bodies in steps, so that freeing them does not block the event loop.

    A body is unused when only this object refers to it. Then no code can read it any more, and its
    pages may go back to the kernel before the object itself is freed.

    _bodies     large bodies, in use or not
    _discarded  number of bytes of the last body in `_bodies` that were already freed
    """

    __slots__ = ("_bodies", "_discarded", "_handle", "_is_freeing")

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        self._discarded = 0
        self._is_freeing = False
        self._handle: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._bodies)

    def add(self, body: bytes) -> None:
        """Free the memory of `body` in steps once nothing uses the body.

        A small body needs no steps, and is ignored here.
        """
        if len(body) > FREED_AT_ONCE:
            self._bodies.insert(0, body)
            if self._handle is None:
                self._handle = asyncio.get_running_loop().call_later(CHECK_S, self._free)

    def check_soon(self) -> None:
        """Schedule a search for unused bodies in the next event loop iteration."""
        if self._handle is not None and not self._is_freeing:
            self._handle.cancel()
            self._handle = asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        # Free one step of an unused body, and schedule the next step or look.
        loop, bodies = asyncio.get_running_loop(), self._bodies
        self._is_freeing = self._is_freeing or self._find_unused()
        if self._is_freeing:
            _discard(bodies[-1], self._discarded, self._discarded + FREED_AT_ONCE)
            self._discarded += FREED_AT_ONCE
            if self._discarded >= len(bodies[-1]):
                bodies.pop()
                self._discarded = 0
                self._is_freeing = self._find_unused()
        if self._is_freeing:
            self._handle = loop.call_soon(self._free)
        else:
            self._handle = loop.call_later(CHECK_S, self._free) if bodies else None

    def _find_unused(self) -> bool:
        # Move an unused body to the end of the list; return whether there is one.
        bodies = self._bodies
        for index in range(len(bodies)):
            if getrefcount(bodies[index]) <= _UNUSED:
                bodies[index], bodies[-1] = bodies[-1], bodies[index]
                return True
        return False


def _discard(body: bytes, start: int, stop: int) -> None:
    # Give the whole pages between two offsets of `body` back to the kernel; they read as zeros.
    data = id(body) + _HEADER
    first = -(-(data + start) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (data + min(stop, len(body))) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        _madvise(first, end - first, mmap.MADV_DONTNEED)
