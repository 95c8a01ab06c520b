"""KvDump: writes offered and received KV to files, so that tests can compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvContent, KvLayout


class KvDump:
    """Writes one rank's KV to .npy files in a folder, as uint8 arrays [layer, block, head, byte].

    The last axis has all bytes of one head in one block. Raises ValueError for a layout in which
    they are not contiguous.
    """

    def __init__(
        self, folder: Path, layout: KvLayout, rank: int, memory: NDArray[np.uint8]
    ) -> None:
        if layout.content not in (KvContent.HEADS, KvContent.PAGES):
            raise ValueError(f"a cache with {layout.content} cannot be written to files")
        steps = layout.steps(0)
        shape = (layout.layers, layout.blocks, layout.rank_heads)
        n_bytes = layout.block_tokens * layout.parts * layout.row_bytes
        strides = (steps.layer, steps.block, steps.head, 1)
        self._pages = as_strided(memory, (*shape, n_bytes), strides, writeable=False)
        self._folder, self._rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, side: str, offer: str, blocks: Sequence[int]) -> None:
        """Write these blocks to the file FOLDER/SIDE-OFFER-RANK.npy.

        The name of the offer is percent-encoded.
        """
        path = self._folder / f"{side}-{quote(offer, safe='')}-{self._rank}.npy"
        np.save(path, self._pages[:, list(blocks)])
