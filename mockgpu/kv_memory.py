"""KvMemory: the bytes of a mock engine's KV cache, with one memory region per rank (GPU).

Bytes are written when tokens are computed, and verified when they are used. The content is defined
in mockgpu/kv_contents.py. paged_kv_cache.py owns the blocks, and kvtransfer moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvtransfer.layout.kv_layout import KvLayout, KvOrder
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from mockgpu.kv_contents import WORD_BYTES, Words, slot_masks


class KvMemory:
    """The KV cache memory of all ranks of one engine.

    Only this class writes to it. The exception are KV transfers, which write to blocks that are
    reserved for them.
    """

    def __init__(self, layout: KvLayout, regions: Sequence[Region]) -> None:
        # Use one memory region per rank. Raises ValueError for a wrong number or size.
        ranks = [region.bytes for region in regions]
        if len(ranks) != layout.tp or any(
            rank.size % layout.rank_block_bytes(index) for index, rank in enumerate(ranks)
        ):
            raise ValueError(
                f"the KV cache of {layout.tp} ranks needs {layout.tp} arrays, not {len(ranks)}"
            )
        self.layout = layout
        self.regions = regions
        masks = slot_masks(layout)
        self._views = [_by_block(rank, layout) for rank in ranks]
        self._masks = [
            masks[:, :, list(layout.heads_of(rank)), None, :] for rank in range(layout.tp)
        ]

    @classmethod
    def create(cls, layout: KvLayout, blocks: int, name: str) -> KvMemory:
        """Allocate zeroed memory for `blocks` KV blocks on every rank.

        It uses little memory at first: the operating system maps a page when it is first written.
        """
        return cls(
            layout,
            [
                MemoryFileRegion.create(blocks, layout.rank_block_bytes(r), name=f"{name}-{r}")
                for r in range(layout.tp)
            ],
        )

    def bump(self, blocks: Sequence[int]) -> None:
        """Increment the generation numbers of KV blocks that will get new content.

        A transfer of the old content detects by the number that the block has changed.
        """
        if blocks:
            for region in self.regions:
                region.bump(blocks)

    def close(self) -> None:
        self._views.clear()
        for region in self.regions:
            region.close()

    def write(self, blocks: Sequence[int], start: int, states: Words) -> None:
        """Write the KV of tokens [start, start + len(states)) of a sequence into its blocks."""
        for view, masks in zip(self._views, self._masks, strict=True):
            for chosen, first, last, part in _pieces(
                blocks, start, states, self.layout.block_tokens
            ):
                # A single fancy index keeps the axes in place: [blocks, layer, part, head, token,
                # word].
                view[chosen, :, :, :, first:last] = part[:, None, None, None, :, None] ^ masks

    def taint(self, blocks: Sequence[int], states: Words) -> int:
        """Verify the KV of the first tokens of a prompt on all ranks.

        blocks  the blocks that store the KV
        states  the expected state of each token (kv_contents.token_states)

        Returns 0 if all bytes are correct, otherwise a digest of the errors. Every layer, head and
        copy of the KV is compared.
        """
        digest = 0
        for rank, (view, masks) in enumerate(zip(self._views, self._masks, strict=True)):
            for chosen, first, last, part in _pieces(blocks, 0, states, self.layout.block_tokens):
                difference = view[chosen, :, :, :, first:last] ^ masks
                difference ^= part[:, None, None, None, :, None]
                if difference.any():
                    digest = (
                        xxh3_64_intdigest(
                            np.ascontiguousarray(difference).data, digest ^ (rank + 1)
                        )
                        | 1
                    )
        return digest


def _by_block(rank: NDArray[np.uint8], layout: KvLayout) -> Words:
    words, per_row = rank.view(np.uint64), layout.row_bytes // WORD_BYTES
    if layout.order is KvOrder.BLHNC:
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
    # Split a token range into (blocks, first and last position in each, states per block).
    #
    # All whole blocks form one piece; a partial block at either end is a piece of its own.
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
