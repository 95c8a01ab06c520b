"""Tests that a mock engine's KV bytes depend only on the prompt, and that wrong bytes are found."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.kv_layout import KvLayout, KvOrder
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import plan_transfer
from mockgpu.kv_bytes import KvMemory, Words, scaled_layout, slot_masks, token_states
from mockgpu.mock_tokenizer import block_keys
from policies.sizing.model_shapes import MODELS, model_named

BLOCKS = 12


def states_of(tokens: bytes) -> Words:
    return token_states(tokens, block_keys(tokens))


def memory(layout: KvLayout) -> KvMemory:
    return KvMemory(
        layout,
        [
            Region.over(
                bytearray(BLOCKS * layout.rank_block_bytes(r)),
                layout.rank_block_bytes(r),
                name=str(r),
            )
            for r in range(layout.tp)
        ],
    )


def small(tp: int, order: KvOrder = KvOrder.BLHNC, mla: bool = False) -> KvLayout:
    model = model_named("deepseek-v3" if mla else "demo-8b")
    layout = scaled_layout(model, tp, 1 / 256)
    return KvLayout(3, layout.kv_heads, 8, layout.dtype, layout.block_tokens, tp, mla, order)


tokens = st.binary(min_size=1, max_size=100).map(lambda part: part + bytes(-len(part) % 4))


@given(tokens, tokens)
def test_a_token_s_state_depends_on_all_tokens_up_to_it_and_on_no_other(
    head: bytes, tail: bytes
) -> None:
    whole = states_of(head + tail)
    alone = states_of(head)
    assert (whole[: len(alone)] == alone).all()
    changed = bytes([head[0] ^ 1]) + head[1:] + tail
    assert not (states_of(changed) == whole).any()


def test_states_and_masks_do_not_repeat() -> None:
    assert len(set(states_of(b"same" * 500).tolist())) == 500
    masks = slot_masks(small(1))
    assert len(set(masks.reshape(-1).tolist())) == masks.size


@pytest.mark.parametrize(
    "layout", [small(1), small(4), small(16), small(2, KvOrder.BLNHC), small(4, mla=True)]
)
@given(st.integers(1, 90), st.integers(0, 90), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_what_is_written_in_pieces_reads_back_whole_and_any_flipped_bit_is_seen(
    layout: KvLayout, n: int, cut: int, rng: Random
) -> None:
    region, states = memory(layout), states_of(np.random.default_rng(n).bytes(4 * n))
    blocks = list(range(BLOCKS))
    rng.shuffle(blocks)
    cut = min(cut, n)
    region.write(blocks, 0, states[:cut])
    region.write(blocks, cut, states[cut:])
    assert region.taint(blocks, states) == 0
    rank = region.regions[rng.randrange(layout.tp)]
    written = np.flatnonzero(rank.bytes)
    at = written[rng.randrange(written.size)]
    rank.bytes[at] ^= 1 << rng.randrange(8)
    assert region.taint(blocks, states) != 0


def test_different_damage_leaves_different_taints() -> None:
    layout, states = small(2), states_of(b"abcd" * 40)
    taints = set()
    for place in range(0, 400, 7):
        region = memory(layout)
        region.write(range(BLOCKS), 0, states)
        region.regions[1].bytes[place] ^= 255
        taints.add(region.taint(range(BLOCKS), states))
    assert len(taints) == 58
    assert 0 not in taints


CUTS = [
    (small(a, x, mla), small(b, y, mla))
    for (a, b), mla in itertools.product(((4, 2), (2, 4), (8, 8), (1, 16), (16, 2)), (False, True))
    for x, y in ((KvOrder.BLHNC, KvOrder.BLHNC), (KvOrder.BLNHC, KvOrder.BLHNC))
]


@pytest.mark.parametrize(("src", "dst"), CUTS)
def test_kv_re_cut_for_another_group_is_what_that_group_would_have_computed(
    src: KvLayout, dst: KvLayout
) -> None:
    states = states_of(np.random.default_rng(1).bytes(4 * 83))
    giver, taker = memory(src), memory(dst)
    giver.write([7, 1, 4, 2, 9, 0], 0, states)
    cut = plan_transfer(src, dst, [7, 1, 4, 2, 9, 0], [3, 5, 8, 11, 6, 2], 83)
    for group in range(cut.groups):
        for number, pair in enumerate(cut.pairs(group)):
            runs = cut.runs(group, number)
            for at, to, length in zip(runs.src, runs.dst, runs.length, strict=True):
                taker.regions[pair.dst_rank].bytes[to : to + length] = giver.regions[
                    pair.src_rank
                ].bytes[at : at + length]
    assert taker.taint([3, 5, 8, 11, 6, 2], states) == 0


@pytest.mark.parametrize("name", sorted({model.name for model in MODELS.values()}))
def test_a_scaled_cache_keeps_heads_and_ranks_and_is_small(name: str) -> None:
    model = model_named(name)
    for tp in (1, 2, 4, 8):
        layout = scaled_layout(model, tp)
        assert layout.kv_heads == model.shardable_kv
        assert layout.mla == model.mla
        assert 0.5 < layout.bytes_per_token / model.kv_token_bytes * 256 < 2
    full = scaled_layout(model, 1, 1.0)
    assert full.bytes_per_token == model.kv_token_bytes
