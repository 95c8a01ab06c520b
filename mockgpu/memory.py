"""KvMemory: the real bytes of a group's KV cache, one region per rank, written as tokens are computed and read back.

What the bytes are is kv.py's; which blocks belong to whom is blocks.py's; how they travel is kvtransfer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvtransfer.layout import KvLayout, KvOrder
from kvtransfer.memory_files import MemoryFileRegion
from kvtransfer.regions import Region
from mockgpu.kv import WORD_BYTES, Words, slot_masks


class KvMemory:
    """All ranks' caches of one group. Sole writer of their bytes, apart from transfers into blocks given to them."""

    def __init__(self, layout: KvLayout, regions: Sequence[Region]) -> None:
        """`regions`: one per rank. ValueError when their number or size is wrong."""
        ranks = [region.bytes for region in regions]
        if len(ranks) != layout.tp or any(
            each.size % layout.rank_block_bytes(i) for i, each in enumerate(ranks)
        ):
            raise ValueError(f"{len(ranks)} arrays do not hold the caches of {layout.tp} ranks")
        self.layout = layout
        self.regions = regions
        masks = slot_masks(layout)
        self._views = [_by_block(rank, layout) for rank in ranks]
        self._masks = [
            masks[:, :, list(layout.heads_of(rank)), None, :] for rank in range(layout.tp)
        ]

    @classmethod
    def create(cls, layout: KvLayout, blocks: int, name: str) -> KvMemory:
        """Zeroed memory for that many blocks on every rank; the pages are taken as they are written."""
        return cls(
            layout,
            [
                MemoryFileRegion.create(blocks, layout.rank_block_bytes(r), name=f"{name}-{r}")
                for r in range(layout.tp)
            ],
        )

    def renew(self, blocks: Sequence[int]) -> None:
        """These blocks get new content: whoever was promised the old one can no longer be given it."""
        if blocks:
            for region in self.regions:
                region.bump(blocks)

    def close(self) -> None:
        """Give the memory back."""
        self._views.clear()
        for region in self.regions:
            region.close()

    def write(self, blocks: Sequence[int], start: int, states: Words) -> None:
        """Store the tokens [start, start + len(states)) of a sequence that lives in `blocks`."""
        for view, masks in zip(self._views, self._masks, strict=True):
            for chosen, first, last, part in _pieces(
                blocks, start, states, self.layout.block_tokens
            ):
                # One fancy index alone keeps the axes in place: [blocks, layer, part, head, token, word].
                view[chosen, :, :, :, first:last] = part[:, None, None, None, :, None] ^ masks

    def taint(self, blocks: Sequence[int], states: Words) -> int:
        """0 when every byte of the tokens [0, len(states)) is in place on every rank; else a digest of what is wrong.

        The bytes are read and unmasked: what is left must be the tokens' states, in each layer, head and replica.
        """
        found = 0
        for rank, (view, masks) in enumerate(zip(self._views, self._masks, strict=True)):
            for chosen, first, last, part in _pieces(blocks, 0, states, self.layout.block_tokens):
                rest = view[chosen, :, :, :, first:last] ^ masks
                rest ^= part[:, None, None, None, :, None]
                if rest.any():
                    found = (
                        xxh3_64_intdigest(np.ascontiguousarray(rest).data, found ^ (rank + 1)) | 1
                    )
        return found


def _by_block(rank: NDArray[np.uint8], layout: KvLayout) -> Words:
    """A rank's bytes as words, seen as [blocks, layers, parts, heads, tokens, words] whatever order they are in."""
    words, per_row = rank.view(np.uint64), layout.row_bytes // WORD_BYTES
    if layout.order is KvOrder.HND:
        return words.reshape(
            -1, layout.layers, layout.parts, layout.rank_heads, layout.block_tokens, per_row
        )
    stored = words.reshape(
        -1, layout.layers, layout.parts, layout.block_tokens, layout.rank_heads, per_row
    )
    return stored.transpose(0, 1, 2, 4, 3, 5)


def _pieces(
    blocks: Sequence[int], start: int, states: Words, size: int
) -> list[tuple[NDArray[np.int64] | list[int], int, int, Words]]:
    """A token range as (blocks, first and last place in each, states per block): whole blocks at once, ends apart."""
    end = start + len(states)
    whole_from, whole_to = -(-start // size), end // size
    if whole_from > whole_to:
        return [([blocks[start // size]], start % size, end % size, states[None, :])]
    cut, tail = whole_from * size - start, whole_to * size - start
    pieces: list[tuple[NDArray[np.int64] | list[int], int, int, Words]] = []
    if cut:
        pieces.append(([blocks[start // size]], start % size, size, states[None, :cut]))
    if whole_to > whole_from:
        chosen = np.asarray(blocks[whole_from:whole_to], np.int64)
        pieces.append((chosen, 0, size, states[cut:tail].reshape(-1, size)))
    if tail < len(states):
        pieces.append(([blocks[whole_to]], 0, end % size, states[None, tail:]))
    return pieces
