"""KV memory that other agents on the same host can map, because it is in a memory file (memfd).

A file contains the blocks. From the next memory page on, it has one counter per block, the block's
generation, which is raised when the block is released for reuse. An agent that maps the file sees
changes of both.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.memory_regions import Region, RegionError
from kvtransfer.layout.sealed_files import SEALS, create_sealed_file

_PAGE = 4096


class MemoryFileRegion(Region):
    """KV memory of one rank in a memory file, which other agents can map but cannot change.

    Seals of the file fix its size, and allow no other mapping or descriptor to write to it.
    """

    __slots__ = ()

    @classmethod
    def create(
        cls, blocks: int, block_bytes: int, *, name: str, populate: bool = False
    ) -> MemoryFileRegion:
        """Allocate zeroed KV memory in a new memory file.

        populate  whether all pages are mapped now, so that transfers do not wait for page faults
        """
        size = _file_bytes(blocks, block_bytes)
        fd, memory = create_sealed_file(name, size, populate=populate)
        return cls(*_views(memory, blocks, block_bytes), block_bytes, name, fd)

    @classmethod
    def attach(cls, fd: int, blocks: int, block_bytes: int, *, name: str) -> MemoryFileRegion:
        """Map another agent's KV memory read-only, and take ownership of the descriptor `fd`.

        Raises RegionError and closes `fd` if the file has another size or lacks a seal.
        """
        try:
            size = _file_bytes(blocks, block_bytes)
            _check_file(fd, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(*_views(memory, blocks, block_bytes), block_bytes, name, fd)

    def close(self) -> None:
        """Close the memory file. May be called twice.

        The memory stays mapped until the last view of it is gone.
        """
        super().close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _file_bytes(blocks: int, block_bytes: int) -> int:
    if blocks < 1 or block_bytes < 1:
        raise RegionError(
            f"KV memory must have at least one block and one byte per block, not {blocks} "
            f"blocks of {block_bytes} bytes"
        )
    return _generations_offset(blocks, block_bytes) + 4 * blocks


def _generations_offset(blocks: int, block_bytes: int) -> int:
    return -(-blocks * block_bytes // _PAGE) * _PAGE


def _views(
    memory: mmap.mmap, blocks: int, block_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    data = np.frombuffer(memory, np.uint8, blocks * block_bytes)
    offset = _generations_offset(blocks, block_bytes)
    return data, np.frombuffer(memory, np.uint32, blocks, offset)


def _check_file(fd: int, size: int) -> None:
    # Raise RegionError unless the memory file has this size and cannot shrink.
    #
    # Reading past the end of a file that its owner has shrunk would kill this process (SIGBUS).
    if os.fstat(fd).st_size != size:
        raise RegionError(
            f"the peer's memory file has {os.fstat(fd).st_size} bytes instead of {size}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionError(
            "the peer's memory file is not mapped, because it does not support seals and its "
            "size may change"
        ) from error
    if seals & SEALS != SEALS:
        raise RegionError(
            f"the peer's memory file is not mapped: it must have the seals {SEALS:#x}, but has "
            f"{seals:#x}"
        )
