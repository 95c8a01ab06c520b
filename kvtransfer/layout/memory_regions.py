"""Regions: the memory of a rank's KV blocks, with a counter per block called its generation.

A block's generation is incremented when the block changes owner. Readers compare it before and
after a read, to detect that the block was reused meanwhile.

memory_files.py has regions that other agents can map. The engine's allocator decides who owns a
block. source.py and sink.py in kvtransfer/transfer decide when it may change owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int64]


def local_rank(rank: int, has_all: bool) -> int:
    """Return the index of a rank's region in its agent.

    An agent has the regions of all ranks, or only that of one rank, with index 0.
    """
    return rank if has_all else 0


class RegionError(Exception):
    """Raised when memory for KV is unusable: it has a wrong size, is read-only, or can shrink."""


class GenerationCheck:
    """Checks whether blocks still have the generations (owner counters) that a reader expects.

    Calling the object returns the answer. Native code can also read the arrays itself.

    region      the memory of the blocks
    blocks      int64 array (n,): block numbers
    promised    uint32 array (n,): their expected generations
    lease_flag  uint32 array (1,): 0 once the blocks may be reused; None: they may not be reused
    """

    __slots__ = ("blocks", "lease_flag", "promised", "region")

    def __init__(
        self,
        region: Region,
        blocks: NDArray[np.int64],
        promised: NDArray[np.uint32],
        lease_flag: NDArray[np.uint32] | None = None,
    ) -> None:
        self.region = region
        self.blocks = np.ascontiguousarray(blocks, np.int64)
        self.promised = np.ascontiguousarray(promised, np.uint32)
        self.lease_flag = lease_flag

    def __call__(self) -> bool:
        if self.lease_flag is not None and not self.lease_flag.item():
            return False
        return self.region.are_current(self.blocks, self.promised)


class Region:
    """The memory of one rank's KV blocks, and the blocks' generations (owner counters).

    bytes        uint8 array (blocks * block_bytes,); the layout decides where a block lies in it
    generations  uint32 array (blocks,): incremented when a block changes owner; wraps around
    address      address of the first byte, for system calls and memory registration
    fd           descriptor of the memory file that other agents on this host can map; None without
                 a file
    """

    __slots__ = ("address", "block_bytes", "bytes", "fd", "generations", "name")

    def __init__(
        self,
        data: NDArray[np.uint8],
        generations: NDArray[np.uint32],
        block_bytes: int,
        name: str,
        fd: int | None = None,
    ) -> None:
        self.bytes = data
        self.generations = generations
        self.address: int = data.__array_interface__["data"][0]
        self.block_bytes = block_bytes
        self.name = name
        self.fd = fd

    @classmethod
    def over(
        cls, buffer: bytearray | memoryview | NDArray[np.uint8], block_bytes: int, *, name: str
    ) -> Region:
        """Return a region over memory that the engine owns. Other agents on this host cannot map
        it.

        Raises RegionError unless `buffer` is contiguous, writable and a multiple of `block_bytes`.
        """
        data = np.frombuffer(buffer, dtype=np.uint8)
        if data.size % block_bytes or not data.flags.writeable:
            raise RegionError(
                f"the memory of region {name} ({data.size} bytes) must be "
                f"writable and consist of blocks of {block_bytes} bytes"
            )
        return Region(data, np.zeros(data.size // block_bytes, np.uint32), block_bytes, name)

    @property
    def blocks(self) -> int:
        return self.generations.size

    def bump(self, blocks: Blocks) -> None:
        """Increment the generations (owner counters) of these blocks, because they change owner.

        A block that is listed twice is incremented once.
        """
        # numpy adds to a copy and writes it back, so duplicates count once.
        self.generations[np.asarray(blocks, np.int64)] += np.uint32(1)

    def generations_of(self, blocks: Blocks) -> NDArray[np.uint32]:
        """Return a copy of the generations (owner counters) of these blocks, in the same order."""
        return self.generations[np.asarray(blocks, np.int64)]

    def are_current(self, blocks: NDArray[np.int64], generations: NDArray[np.uint32]) -> bool:
        """Return whether every block still has the given generation, and so has not changed its
        owner.
        """
        return self.generations[blocks].tobytes() == generations.tobytes()

    def close(self) -> None:
        """Drop this region's references to its memory. The method may be called twice."""
        self.bytes = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint32)
        self.address = 0
