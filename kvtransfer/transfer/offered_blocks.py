"""Counts how many offers of KV contain each block, which must not be reused before all have ended.

No I/O.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockNumbers = NDArray[np.int64]


class OfferedBlocks:
    """For each KV block, the number of open offers that contain it.

    Several offers contain the same block if their requests share the beginning of a prompt.
    """

    def __init__(self, blocks: int) -> None:
        self._offers = np.zeros(blocks, np.int32)

    def check_range(self, blocks: BlockNumbers) -> None:
        """Raise ValueError unless all `blocks` are block numbers of the agent's memory."""
        if blocks.min() < 0 or blocks.max() >= self._offers.size:
            raise ValueError(
                f"block numbers must be from 0 to {self._offers.size - 1} (the agent's memory), "
                f"not {blocks.min()} to {blocks.max()}"
            )

    def protect(self, blocks: BlockNumbers) -> None:
        """Record an offer that contains these blocks, each of which may be listed only once."""
        self._offers[blocks] += 1

    def release(self, blocks: BlockNumbers) -> BlockNumbers:
        """Record that an offer of these blocks has ended; each block is listed once.

        Returns the blocks that no other offer contains. They may now be reused.
        """
        self._offers[blocks] -= 1
        freed: BlockNumbers = blocks[self._offers[blocks] == 0]
        return freed
