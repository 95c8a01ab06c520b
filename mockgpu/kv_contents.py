"""The simulated content of a KV cache: bytes that are derived from the tokens and can be verified.

- Every token has a state, a 64-bit word that depends on all tokens up to it.
- Every position in the cache (layer, key or value, head, position in the head) has a mask.
- The cached word is state XOR mask.

So equal prompts have equal bytes in any layout. A word that is flipped, at a wrong position, or
from another prompt yields another state. mockgpu/kv_memory.py owns the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
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
