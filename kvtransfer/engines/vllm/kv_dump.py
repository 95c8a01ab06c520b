"""KvDump: writes KV to files at both engines of a transfer, so that tests can compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvContent, KvLayout


class KvDump:
    """Writes KV blocks of one rank to .npy files, for tests.

    A file has a uint8 array [layer, block, head, ...]. Behind the head, there is one axis with all
    bytes of the head in one block. If a token's keys and values lie side by side, there are two
    axes instead: token and byte.

    Raises ValueError for a layout in which all keys of a block lie before its values.
    """

    def __init__(
        self, folder: Path, layout: KvLayout, rank: int, memory: NDArray[np.uint8]
    ) -> None:
        steps = layout.steps(0)
        cell = layout.parts * layout.row_bytes
        inner: tuple[int, ...]
        inner_steps: tuple[int, ...]
        if layout.content in (KvContent.HEADS, KvContent.PAGES):
            inner, inner_steps = (layout.block_tokens * cell,), (1,)
        elif layout.content is KvContent.TOKENS:
            inner, inner_steps = (layout.block_tokens, cell), (steps.token, 1)
        else:
            raise ValueError(f"a cache with {layout.content} cannot be written to files")
        shape = (layout.layers, layout.blocks, layout.rank_heads, *inner)
        strides = (steps.layer, steps.block, steps.head, *inner_steps)
        self._pages = as_strided(memory, shape, strides, writeable=False)
        self._folder, self._rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, side: str, offer: str, blocks: Sequence[int]) -> None:
        """Write the KV of these blocks to the file FOLDER/SIDE-OFFER-RANK.npy.

        side   "offered" at the prefill engine, "received" at the decode engine
        offer  name of the offer, percent-encoded in the file's name
        """
        path = self._folder / f"{side}-{quote(offer, safe='')}-{self._rank}.npy"
        np.save(path, self._pages[:, list(blocks)])
