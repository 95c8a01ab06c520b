"""Regions: the memory that a rank's KV blocks lie in, and a generation per block that tells one owner from the next.

Not here: who owns a block (the engine's allocator), or when it may be given to the next (source.py, sink.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int64]

_PAGE = 4096
_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; the fcntl module names it from Python 3.13 on
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


class RegionError(Exception):
    """The memory is not what it should be: another size, or a file whose owner could still change its size."""


class Region:
    """The blocks of one rank, and their generations.

    bytes        uint8 (blocks * block_bytes,): block b begins at b * block_bytes
    generations  uint32 (blocks,): raised by one whenever a block stops being somebody's; wraps around
    address      of the first byte, for iovecs and memory registration
    fd           of the memory file that peers on this host map; None where the memory belongs to the engine

    A memory file holds the blocks and then, from the next page on, the generations, so that a peer sees both change.
    It is sealed: its size is fixed, and nobody but this mapping can write it, whoever holds the descriptor.
    """

    __slots__ = ("address", "block_bytes", "bytes", "fd", "generations", "name")

    def __init__(
        self, data: NDArray[np.uint8], generations: NDArray[np.uint32], block_bytes: int, name: str, fd: int | None
    ) -> None:
        self.bytes = data
        self.generations = generations
        self.address: int = data.__array_interface__["data"][0]
        self.block_bytes = block_bytes
        self.name = name
        self.fd = fd

    @classmethod
    def create(cls, blocks: int, block_bytes: int, *, name: str, populate: bool = False) -> Region:
        """Zeroed memory of this process. `populate` takes the pages now, so that no transfer waits for them."""
        size = _file_bytes(blocks, block_bytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
            # The mapping came first: it is the last one that may write.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(*_views(memory, blocks, block_bytes), block_bytes, name, fd)

    @classmethod
    def attach(cls, fd: int, blocks: int, block_bytes: int, *, name: str) -> Region:
        """A peer's region, read-only; takes over `fd`. Raises RegionError (and closes it) unless it is sealed so."""
        try:
            size = _file_bytes(blocks, block_bytes)
            _check_file(fd, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(*_views(memory, blocks, block_bytes), block_bytes, name, fd)

    @classmethod
    def over(cls, buffer: bytearray | memoryview | NDArray[np.uint8], block_bytes: int, *, name: str) -> Region:
        """Memory that the engine owns: whole blocks, writable, contiguous. Peers on this host cannot map it."""
        data = np.frombuffer(buffer, dtype=np.uint8)
        if data.size % block_bytes or not data.flags.writeable:
            raise RegionError(f"{name}: {data.size} bytes are no writable blocks of {block_bytes}")
        return cls(data, np.zeros(data.size // block_bytes, np.uint32), block_bytes, name, None)

    @property
    def blocks(self) -> int:
        return self.generations.size

    def bump(self, blocks: Blocks) -> None:
        """These blocks have changed hands: whoever was promised their old content can no longer be given it."""
        # A block that is named twice is raised once all the same: numpy adds to a copy, and puts that back.
        self.generations[np.asarray(blocks, np.int64)] += np.uint32(1)

    def generations_of(self, blocks: Blocks) -> NDArray[np.uint32]:
        """A copy, in the order of `blocks`."""
        return self.generations[np.asarray(blocks, np.int64)]

    def current(self, blocks: NDArray[np.int64], generations: NDArray[np.uint32]) -> bool:
        """Whether every one of these blocks is still of its generation. 2 us for 1,000 blocks."""
        return self.generations.take(blocks).tobytes() == generations.tobytes()

    def close(self) -> None:
        """Let go of the memory; it is unmapped once nobody holds a view of it. May be called twice."""
        self.bytes = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint32)
        self.address = 0
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _file_bytes(blocks: int, block_bytes: int) -> int:
    if blocks < 1 or block_bytes < 1:
        raise RegionError(f"a region has blocks: not {blocks} of {block_bytes} bytes")
    return _generations_at(blocks, block_bytes) + 4 * blocks


def _generations_at(blocks: int, block_bytes: int) -> int:
    return -(-blocks * block_bytes // _PAGE) * _PAGE


def _views(memory: mmap.mmap, blocks: int, block_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    data = np.frombuffer(memory, np.uint8, blocks * block_bytes)
    return data, np.frombuffer(memory, np.uint32, blocks, _generations_at(blocks, block_bytes))


def _check_file(fd: int, size: int) -> None:
    """A file that its owner could shrink would kill us at the next read."""
    if os.fstat(fd).st_size != size:
        raise RegionError(f"the peer's memory file has {os.fstat(fd).st_size} bytes, not {size}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as wrong:
        raise RegionError("the peer's memory file cannot be sealed") from wrong
    if seals & _SEALS != _SEALS:
        raise RegionError(f"the peer's memory file is not sealed: {seals:#x}")
