"""Counts how many offers of KV protect each block of an agent's memory. No I/O."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockNumbers = NDArray[np.int64]


class OfferedBlocks:
    """The number of open offers of each KV block.

    Several offers protect the same block if their requests share a prefix.
    """

    def __init__(self, blocks: int) -> None:
        self._offers = np.zeros(blocks, np.int32)

    def check_range(self, blocks: BlockNumbers) -> None:
        """Raise ValueError if the agent's memory lacks one of these blocks."""
        if blocks.min() < 0 or blocks.max() >= self._offers.size:
            raise ValueError(f"block numbers must be from 0 to {self._offers.size - 1}")

    def protect(self, blocks: BlockNumbers) -> None:
        """Count one more offer of each of these blocks, which must be distinct."""
        self._offers[blocks] += 1

    def release(self, blocks: BlockNumbers) -> BlockNumbers:
        """Count one offer less of each of these distinct blocks.

        Returns those that no offer protects any more.
        """
        self._offers[blocks] -= 1
        freed: BlockNumbers = blocks[self._offers[blocks] == 0]
        return freed
