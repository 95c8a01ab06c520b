"""The memory that is moved: a pool per process, which blocks go where, and whether they arrived.

Block contents come from one seeded reference that every worker maps, so a block in the wrong place or with a wrong byte
is found. Runs in the peers' interpreters too: numpy and the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Blocks to move: slot src[i] of the source's pool goes to slot dst[i] of the sink's."""

    block_bytes: int
    src: Slots
    dst: Slots

    @property
    def n_bytes(self) -> int:
        return self.block_bytes * len(self.src)


def draw(pool_bytes: int, block_bytes: int, count: int, seed: int) -> Draw:
    """`count` different slots on either side, in random order: the same in both processes for the same seed."""
    rng = np.random.default_rng(seed)
    slots = pool_bytes // block_bytes
    return Draw(block_bytes, rng.permutation(slots)[:count], rng.permutation(slots)[:count])


def reference(pool_bytes: int, seed: int) -> Bytes:
    """What every source's pool holds."""
    return (
        np.random.default_rng(seed)
        .integers(0, 2**64, pool_bytes // 8, dtype=np.uint64)
        .view(np.uint8)
    )


def wipe(pool: Bytes, what: Draw) -> None:
    """Clears the blocks that will be written, so that nothing of an earlier pass can pass for this one's."""
    pool.reshape(-1, what.block_bytes)[what.dst] = 0


def wrong_blocks(pool: Bytes, expected: Bytes, what: Draw) -> int:
    """How many blocks differ from the source's, looked at a few MiB at a time."""
    have = pool.reshape(-1, what.block_bytes).view(np.uint64)
    want = expected.reshape(-1, what.block_bytes).view(np.uint64)
    step = max(1, (4 << 20) // what.block_bytes)
    wrong = 0
    for first in range(0, len(what.src), step):
        part = slice(first, first + step)
        wrong += int((have[what.dst[part]] != want[what.src[part]]).any(axis=1).sum())
    return wrong
