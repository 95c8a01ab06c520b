"""The memory between which the KV benchmark copies blocks; chooses blocks and verifies them.

Each process has one pool of memory. The content of all blocks is generated from a fixed random
seed, so that wrong bytes and misplaced blocks are detected.

This module also runs in the virtual environment of the other projects, so it imports only numpy and
the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """A random choice of blocks that one transfer of the benchmark copies.

    block_bytes  size of each block in bytes
    src          numbers of the blocks at the source
    dst          numbers of the blocks at the sink; block src[i] is copied to block dst[i]
    """

    block_bytes: int
    src: Slots
    dst: Slots

    @property
    def n_bytes(self) -> int:
        return self.block_bytes * len(self.src)


def draw(pool_bytes: int, block_bytes: int, count: int, seed: int) -> Draw:
    """Choose `count` random blocks to read at the source, and as many to write at the sink.

    The same seed chooses the same blocks in both processes.
    """
    rng = np.random.default_rng(seed)
    slots = pool_bytes // block_bytes
    return Draw(block_bytes, rng.permutation(slots)[:count], rng.permutation(slots)[:count])


def reference(pool_bytes: int, seed: int) -> Bytes:
    """Return the bytes that fill the source's memory; equal seeds give equal bytes.

    The receiver compares the bytes that it has received with them.
    """
    return (
        np.random.default_rng(seed)
        .integers(0, 2**64, pool_bytes // 8, dtype=np.uint64)
        .view(np.uint8)
    )


def wipe(pool: Bytes, drawn: Draw) -> None:
    """Clear the blocks that the next transfer writes, so that old bytes cannot pass for new ones.

    pool   the memory
    drawn  the blocks of the transfer
    """
    pool.reshape(-1, drawn.block_bytes)[drawn.dst] = 0


def wrong_blocks(pool: Bytes, expected: Bytes, drawn: Draw) -> int:
    actual = pool.reshape(-1, drawn.block_bytes).view(np.uint64)
    wanted = expected.reshape(-1, drawn.block_bytes).view(np.uint64)
    step = max(1, (4 << 20) // drawn.block_bytes)  # a few MiB at a time
    wrong = 0
    for first in range(0, len(drawn.src), step):
        part = slice(first, first + step)
        wrong += int((actual[drawn.dst[part]] != wanted[drawn.src[part]]).any(axis=1).sum())
    return wrong
