"""What a mock group's KV cache holds: bytes that are a function of the tokens, and how to tell whether they are right.

Every token has a state, a 64-bit word that depends on all tokens up to it. Every slot of the cache (layer, key or
value, head, place in the head) has a mask. A cached word is state XOR mask: equal prompts give equal bytes in any
layout, and a word in the wrong place, of another prompt, or with one bit flipped unmasks to another state.
Plain arithmetic on arrays; who owns the memory is memory.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import KvDtype, KvLayout
from mockgpu.blocks import BLOCK_TOKENS, blocks_for
from mockgpu.handoff.spec import DEFAULT_SCALE
from mockgpu.llm import Llm
from mockgpu.text import token_count

Words = NDArray[np.uint64]

WORD_BYTES = 8
SCALARS_PER_WORD = 4

# Odd constants of splitmix64 and friends: multiplication by them is a bijection on 64 bits.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mixed(words: Words) -> Words:
    """splitmix64's finaliser: a bijection in which every bit of the input moves every bit of the output."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_A
    words = (words ^ (words >> np.uint64(27))) * _MIX_B
    return words ^ (words >> np.uint64(31))


def scaled_layout(model: Llm, tp: int, scale: float = DEFAULT_SCALE) -> KvLayout:
    """The model's cache with about `scale` of its bytes: thinner heads first, then fewer layers.

    Heads, ranks, dtype and MLA stay, so that re-cutting it between groups is the real thing. ValueError for a scale
    outside (0, 1] or ranks that the heads cannot be spread over.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"kv scale {scale} is not in (0, 1]")
    heads = model.shardable_kv
    full = model.kv_scalars if model.mla else model.kv_scalars // (2 * heads)
    dim = max(1, round(full * scale / SCALARS_PER_WORD)) * SCALARS_PER_WORD
    layers = min(model.layers, max(2, round(model.layers * scale * full / dim)))
    return KvLayout(layers, heads, dim, KvDtype.BF16, BLOCK_TOKENS, tp, model.mla)


def token_states(tokens: bytes, keys: Sequence[int]) -> Words:
    """The state of each token, shape [tokens]; `keys` are the chained keys of (at least) its full blocks (text.py).

    About 40 us per 2,000 tokens: within a block a running sum of mixed (token, place), begun by the key of all before.
    """
    n = token_count(tokens)
    blocks = blocks_for(n)
    ids = np.zeros(blocks * BLOCK_TOKENS, np.uint64)
    ids[:n] = np.frombuffer(tokens, np.uint32)
    before = np.zeros(blocks, np.uint64)
    before[1:] = np.array(keys[: blocks - 1], np.uint64)
    places = np.arange(1, BLOCK_TOKENS + 1, dtype=np.uint64) << np.uint64(32)
    sums = np.cumsum(_mixed(ids.reshape(blocks, BLOCK_TOKENS) + places), axis=1, dtype=np.uint64)
    states: Words = _mixed(sums + _mixed(before + _GOLDEN)[:, None]).reshape(-1)[:n]
    return states


def slot_masks(layout: KvLayout) -> Words:
    """The mask of every slot, shape [layers, 2 (1 with MLA), kv heads, words per head]: of the model, not of a rank."""
    shape = (layout.layers, layout.parts, layout.kv_heads, layout.row_bytes // WORD_BYTES)
    numbers = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint64)
    return _mixed(numbers * _GOLDEN).reshape(shape)
