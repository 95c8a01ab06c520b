"""The memory of a rank's KV blocks, with a counter per block that shows whether it was reused.

A transfer reads blocks that the engine may take back at any time. So each block has a generation, a
counter that is raised when the block is released for reuse. A reader compares it before and after
it reads the block; if it has changed, the bytes are useless.

memory_files.py has regions that other agents can map. The engine's allocator decides which request
gets a block. source.py and sink.py in kvtransfer/transfer decide when a block is released.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int64]


def local_rank(rank: int, has_all: bool) -> int:
    """Return the index of a rank's memory in the list of regions of the agent that serves it.

    has_all  True: the agent has the memory of all ranks; False: only of one rank, at index 0
    """
    return rank if has_all else 0


class RegionError(Exception):
    """Raised when memory for KV is unusable: it has a wrong size, is read-only, or can shrink."""


class GenerationCheck:
    """Checks whether blocks were released for reuse while they were being sent.

    Each block has a generation, a counter that is raised when the block is released. Calling this
    object returns True if no generation has changed. C code can also read the arrays itself.

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
    """The memory of one rank's KV blocks, with a counter per block that shows whether it was
    reused.

    bytes        uint8 array (blocks * block_bytes,); the layout decides where a block lies in it
    generations  uint32 array (blocks,): the counters, raised when a block is released for reuse;
                 they wrap around
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
        """Return a region over memory that the engine owns, which other agents on this host cannot
        map.

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
        """Raise the generations (reuse counters) of these blocks, because they are released for
        reuse.

        A reader of a block compares this counter, and so notices that the block may have other
        content. A block that is listed twice is counted once.
        """
        # numpy adds to a copy and writes it back, so duplicates count once.
        self.generations[np.asarray(blocks, np.int64)] += np.uint32(1)

    def generations_of(self, blocks: Blocks) -> NDArray[np.uint32]:
        """Return a copy of the generations (reuse counters) of these blocks, in the same order."""
        return self.generations[np.asarray(blocks, np.int64)]

    def are_current(self, blocks: NDArray[np.int64], generations: NDArray[np.uint32]) -> bool:
        """Return whether none of these blocks was released for reuse since its generation was read.

        generations  the blocks' generations (reuse counters) as they were then
        """
        return self.generations[blocks].tobytes() == generations.tobytes()

    def close(self) -> None:
        """Drop this object's references to the KV memory. The method may be called twice."""
        self.bytes = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint32)
        self.address = 0
