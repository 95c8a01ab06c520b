"""The bytes of a mock engine's KV cache: their content, the memory of each rank, and their check.

The content is derived from the tokens, so that it can be verified:

- Every token has a state, a 64-bit word that depends on all tokens up to it.
- Every position in the cache (layer, key or value, head, position in the head) has a mask.
- The cached word is state XOR mask.

So equal prompts have equal bytes in any layout. A word that is flipped, at a wrong position, or
from another prompt yields another state. Bytes are written when tokens are computed, and verified
when they are used. paged_kv_cache.py owns the blocks, and kvtransfer moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvtransfer.layout.kv_layout import KvDtype, KvLayout, KvOrder
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from mockgpu.kv_options import DEFAULT_SCALE
from mockgpu.mock_tokenizer import token_count
from mockgpu.paged_kv_cache import BLOCK_TOKENS, blocks_for
from policies.sizing.model_shapes import Llm

Words = NDArray[np.uint64]

WORD_BYTES = 8
SCALARS_PER_WORD = 4

# Odd constants of splitmix64: multiplication by them is a bijection on 64 bits.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_A
    words = (words ^ (words >> np.uint64(27))) * _MIX_B
    return words ^ (words >> np.uint64(31))


def scaled_layout(model: Llm, tp: int, scale: float = DEFAULT_SCALE) -> KvLayout:
    """Return a smaller copy of the model's KV cache layout, with about `scale` of its bytes.

    It reduces the head size first, then the number of layers. Heads, ranks, dtype and MLA stay the
    same, so that transfers between different layouts stay realistic. Raises ValueError if `scale`
    is not in (0, 1], or if the heads cannot be divided among the ranks.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"the KV scale must be above 0 and at most 1, not {scale}")
    heads = model.shardable_kv
    full = model.kv_scalars if model.mla else model.kv_scalars // (2 * heads)
    dim = max(1, round(full * scale / SCALARS_PER_WORD)) * SCALARS_PER_WORD
    layers = min(model.layers, max(2, round(model.layers * scale * full / dim)))
    return KvLayout(layers, heads, dim, KvDtype.BF16, BLOCK_TOKENS, tp, model.mla)


def token_states(tokens: bytes, keys: Sequence[int]) -> Words:
    """Return the simulated KV of each token: a state of 64 bits. Shape: [tokens].

    As in a real model, a state depends on the token and on all tokens before it. Within a block, it
    is a running sum of hashes of (token, position). The sum starts with the key of the block
    before.

    tokens  the tokens, four bytes each
    keys    keys of at least all full blocks (mock_tokenizer.py)
    """
    n = token_count(tokens)
    blocks = blocks_for(n)
    ids = np.zeros(blocks * BLOCK_TOKENS, np.uint64)
    ids[:n] = np.frombuffer(tokens, np.uint32)
    before = np.zeros(blocks, np.uint64)
    before[1:] = np.array(keys[: blocks - 1], np.uint64)
    places = np.arange(1, BLOCK_TOKENS + 1, dtype=np.uint64) << np.uint64(32)
    sums = np.cumsum(_mix(ids.reshape(blocks, BLOCK_TOKENS) + places), axis=1, dtype=np.uint64)
    states: Words = _mix(sums + _mix(before + _GOLDEN)[:, None]).reshape(-1)[:n]
    return states


def slot_masks(layout: KvLayout) -> Words:
    """Return a 64-bit mask for every position of a token's KV: layer, key or value, head, word.

    The mock stores a token's state XOR the mask of the position. A check thus detects bytes at a
    wrong position. Shape: [layers, 2 (1 with MLA), KV heads, words per head].
    """
    shape = (layout.layers, layout.parts, layout.kv_heads, layout.row_bytes // WORD_BYTES)
    numbers = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint64)
    return _mix(numbers * _GOLDEN).reshape(shape)


class KvMemory:
    """The KV cache memory of all ranks of one engine.

    Only this class writes to it, except for KV transfers, which write to blocks that are reserved
    for them.
    """

    def __init__(self, layout: KvLayout, regions: Sequence[Region]) -> None:
        # Use one memory region per rank. Raises ValueError for a wrong number or size.
        ranks = [region.bytes for region in regions]
        if len(ranks) != layout.tp or any(
            rank.size % layout.rank_block_bytes(index) for index, rank in enumerate(ranks)
        ):
            raise ValueError(
                f"the KV cache needs {layout.tp} arrays of whole blocks, one for each rank; "
                f"{len(ranks)} arrays were given"
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
        """Raise the generations (reuse counters) of KV blocks that will get new content.

        A transfer of the old content notices by its counter that a block has changed.
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
        """Return 0 if a prompt's KV is correct on all ranks, otherwise a digest of the errors.

        blocks  the blocks that store the KV
        states  the expected word of each token, from token_states()

        Every layer, head and copy of the KV is compared.
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
