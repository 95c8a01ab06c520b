"""Resharding against an oracle: every scalar has a unique name.

After copying the runs, each destination rank must have exactly the right names in the right places,
and nothing else may have changed.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.layout.layout import KvDtype, KvLayout, KvOrder
from kvtransfer.layout.reshard import TransferPlan, plan_transfer
from kvtransfer.transfer.receive_tracker import ReceiveTracker

Words = NDArray[np.uint64]
WORD = 8
UNTOUCHED = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
FOREIGN = np.uint64(1 << 62)


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    """Draw two layouts of one model, with all permitted differences."""
    mla = draw(st.booleans())
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([KvDtype.BF16, KvDtype.FP8_E4M3]))
    head_dim = draw(st.sampled_from([8, 16]))

    def one() -> KvLayout:
        return KvLayout(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
            tp=draw(st.sampled_from([1, 2, 4, 8])),
            mla=mla,
            order=draw(st.sampled_from(KvOrder)),
            pp=draw(st.integers(1, layers)),
        )

    return one(), one()


def names(layout: KvLayout, rank: int, first_token: int) -> Words:
    """Return the content of a block from `first_token` on for this rank, by
    kvtransfer/layout/layout.py's description.
    """
    stage, tp_rank = divmod(rank, layout.tp)
    tokens = range(first_token, first_token + layout.block_tokens)
    words = range(layout.row_bytes // WORD)
    layers, parts, heads = layout.layers_of(stage), range(layout.parts), layout.heads_of(tp_rank)
    axes = [layers, parts, heads, tokens, words]
    weights = [10**9, 10**8, 10**6, 10, 1]
    if layout.order is KvOrder.NHD:
        axes[2:4], weights[2:4] = [tokens, heads], [10, 10**6]
    grids = np.ix_(*(np.array(axis, np.uint64) for axis in axes))
    total: Words = sum(
        (grid * np.uint64(weight) for grid, weight in zip(grids, weights, strict=True)),
        np.uint64(1),
    )
    return total.ravel()


def token_of(words: Words) -> Words:
    return (words - np.uint64(1)) % np.uint64(10**6) // np.uint64(10)


def region(layout: KvLayout, rank: int, blocks: int, fill: np.uint64) -> Words:
    return np.full((blocks, layout.rank_block_bytes(rank) // WORD), fill, np.uint64)


def source(layout: KvLayout, rank: int, blocks: list[int], spare: int) -> Words:
    memory = region(layout, rank, len(blocks) + spare, FOREIGN)
    for number, block in enumerate(blocks):
        memory[block] = names(layout, rank, number * layout.block_tokens)
    return memory


def expected(layout: KvLayout, rank: int, blocks: list[int], spare: int, covered: range) -> Words:
    memory = region(layout, rank, len(blocks) + spare, UNTOUCHED)
    for number, block in enumerate(blocks):
        whole = names(layout, rank, number * layout.block_tokens)
        inside = (token_of(whole) >= covered.start) & (token_of(whole) < covered.stop)
        memory[block] = np.where(inside, whole, UNTOUCHED)
    return memory


def carry_out(
    transfer_plan: TransferPlan, sources: list[Words], sinks: list[Words], window_bytes: int
) -> int:
    """Copy window by window, with groups in any order. Returns the bytes written."""
    arrivals, written = ReceiveTracker(transfer_plan), 0
    for group in reversed(range(transfer_plan.groups)):
        pairs = transfer_plan.pairs(group)
        assert len(set(pairs)) == len(pairs)
        for pair, first, count, n_bytes in transfer_plan.windows(group, window_bytes):
            assert n_bytes <= window_bytes or count == 1
            runs = arrivals.begin(group, pair, first, count, n_bytes)
            old, new = (
                side[rank].reshape(-1).view(np.uint8)
                for side, rank in zip((sources, sinks), pairs[pair], strict=True)
            )
            for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
                new[dst : dst + length] = old[src : src + length]
            written += n_bytes
            arrivals.land(group, pair, first, count)
    assert arrivals.is_complete
    assert arrivals.n_bytes == transfer_plan.n_bytes == written
    return written


@settings(max_examples=250, deadline=None)
@given(layouts=layout_pairs(), data=st.data())
def test_every_scalar_arrives_in_its_place_once_and_nothing_else_is_touched(
    layouts: tuple[KvLayout, KvLayout], data: st.DataObject
) -> None:
    src, dst = layouts
    tokens = data.draw(st.integers(1, 20), "tokens")
    skip = data.draw(st.integers(0, tokens - 1), "skip_tokens")
    spare = data.draw(st.integers(0, 3), "spare blocks")
    blocks = [
        data.draw(some_blocks(-(-tokens // layout.block_tokens), spare)) for layout in layouts
    ]
    transfer_plan = plan_transfer(
        src,
        dst,
        *blocks,
        tokens,
        skip_tokens=skip,
        group_layers=data.draw(st.none() | st.integers(1, src.layers), "group_layers"),
        max_run_bytes=data.draw(st.sampled_from([64, 200, 1 << 20]), "most_run_bytes"),
        max_runs=data.draw(st.sampled_from([1, 7, 1 << 16]), "most_runs"),
    )
    assert (transfer_plan.tokens.start, transfer_plan.tokens.stop >= tokens) == (skip, True)
    assert any(
        transfer_plan.tokens.stop - tokens < size for size in (src.block_tokens, dst.block_tokens)
    )
    sources = [source(src, rank, blocks[0], spare) for rank in range(src.ranks)]
    sinks = [region(dst, rank, len(blocks[1]) + spare, UNTOUCHED) for rank in range(dst.ranks)]
    wanted = [
        expected(dst, rank, blocks[1], spare, transfer_plan.tokens) for rank in range(dst.ranks)
    ]
    written = carry_out(
        transfer_plan,
        sources,
        sinks,
        data.draw(st.sampled_from([1, 100, 1000, 1 << 20]), "window_bytes"),
    )
    for rank in range(dst.ranks):
        np.testing.assert_array_equal(sinks[rank], wanted[rank], f"rank {rank}")
        # All bytes are right and their number is minimal, so none was written twice.
    assert written == WORD * sum(int((memory != UNTOUCHED).sum()) for memory in wanted)


@st.composite
def some_blocks(draw: st.DrawFn, count: int, spare: int) -> list[int]:
    """Draw consecutive or scattered blocks."""
    if draw(st.booleans()):
        return list(range(spare, spare + count))
    return draw(st.permutations(range(count + spare)))[:count]


@settings(max_examples=50, deadline=None)
@given(layouts=layout_pairs())
def test_source_ranks_with_the_same_heads_send_equal_shares(
    layouts: tuple[KvLayout, KvLayout],
) -> None:
    """Equal if the layers of a stage, one group each, divide evenly; else within one layer."""
    src, dst = layouts
    copies = max(1, src.tp // src.kv_heads)
    transfer_plan = plan_transfer(src, dst, range(20), range(20), 4, group_layers=1)
    load = np.zeros((src.pp, src.tp))
    for group in range(transfer_plan.groups):
        for number, (src_rank, _) in enumerate(transfer_plan.pairs(group)):
            load[divmod(src_rank, src.tp)] += transfer_plan.runs(group, number).n_bytes
    for stage in range(src.pp):
        layer_count = len(src.layers_of(stage))
        if layer_count % copies == 0:
            assert np.ptp(load[stage]) == 0
        else:
            assert np.ptp(load[stage]) <= load[stage].sum() / layer_count
