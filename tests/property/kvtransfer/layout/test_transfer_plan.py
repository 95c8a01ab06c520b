"""Property tests of plans that copy KV between different memory layouts.

In the test's model, every number of the KV is different. After the planned byte ranges are copied,
each receiving rank must have exactly the right numbers in the right places. Nothing else may have
changed.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from kvtransfer.layout.transfer_plan import (
    Ranks,
    TransferPlan,
    plan_transfer,
    sink_ranks,
    source_ranks,
)
from kvtransfer.transfer.receive_tracker import ReceiveTracker

Words = NDArray[np.uint64]
WORD = 8
UNTOUCHED = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
FOREIGN = np.uint64(1 << 62)
BLOCKS = 23
PAGE_ORDERS = [KvOrder.LBHNC, KvOrder.LHBNC, KvOrder.BLHNC, KvOrder.BHLNC]


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    mla = draw(st.booleans())
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([KvDtype.FP32, KvDtype.BF16, KvDtype.FP8_E4M3, KvDtype.INT8]))
    head_dim = draw(st.sampled_from([8, 16]))
    scale_bytes = draw(st.sampled_from([0, 8]))
    pages_of = draw(st.sampled_from([0, 0, 0, 4]))

    def one() -> KvLayout:
        order = draw(st.sampled_from(PAGE_ORDERS if pages_of else list(KvOrder)))
        return KvLayout(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=pages_of or draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
            tp=draw(st.sampled_from([1, 2, 4, 8])),
            mla=mla,
            order=order,
            pp=draw(st.integers(1, layers)),
            content=KvContent.PAGES if pages_of else draw(st.sampled_from(contents(order))),
            page_format="amx" if pages_of else "",
            blocks=BLOCKS,
            scale_bytes=scale_bytes,
        )

    return one(), one()


def contents(order: KvOrder) -> list[KvContent]:
    heads_first = order.index("h") < order.index("n")
    adjacent = abs(order.index("h") - order.index("n")) == 1 and order.endswith(("hnc", "nhc"))
    return [
        KvContent.TOKENS,
        *([KvContent.HEADS] if heads_first else []),
        *([KvContent.PLANES] if adjacent else []),
    ]


def in_memory(layout: KvLayout, values: Words) -> Words:
    # Return a rank's memory for values [layer, block, head, token, part, word].
    #
    # vLLM describes it as an array [L, B, H, N, C] whose axes are transposed, and a backend divides
    # (N, C) of a head, or (H, N, C) of a block, between keys and values.
    layers, blocks, heads, tokens, parts, words = values.shape
    if layout.content is KvContent.PLANES:
        values = values.transpose(0, 1, 4, 2, 3, 5)
        axes = {"l": 0, "b": 1, "h": 3, "n": 4}
        order = [axes[axis] for axis in layout.order[:-1]]
        return values.transpose(*order[:2], 2, *order[2:], 5).ravel()
    if layout.content in (KvContent.HEADS, KvContent.PAGES):
        values = values.transpose(0, 1, 2, 4, 3, 5)
    logical = values.reshape(layers, blocks, heads, tokens, parts * words)
    return logical.transpose(*("lbhnc".index(axis) for axis in layout.order)).ravel()


def source(layout: KvLayout, rank: int, blocks: list[int]) -> Words:
    stage, tp_rank = divmod(rank, layout.tp)
    layers, heads = layout.layers_of(stage), layout.heads_of(tp_rank)
    size, words = layout.block_tokens, layout.row_bytes // WORD
    shape = (len(layers), BLOCKS, len(heads), size, layout.parts, words)
    values = np.full(shape, FOREIGN, np.uint64)
    for number, block in enumerate(blocks):
        tokens = range(number * size, (number + 1) * size)
        axes = (layers, heads, tokens, range(layout.parts), range(words))
        weights = (10**9, 10**6, 10, 10**8, 1)
        values[:, block] = sum(
            (
                np.array(grid, np.uint64) * np.uint64(weight)
                for grid, weight in zip(np.ix_(*axes), weights, strict=True)
            ),
            np.uint64(1),
        )
    return in_memory(layout, values)


def expected(layout: KvLayout, rank: int, blocks: list[int], covered: range) -> Words:
    # Return the memory after the transfer: values of the covered tokens, otherwise unchanged.
    whole = source(layout, rank, blocks)
    tokens = (whole - np.uint64(1)) % np.uint64(10**6) // np.uint64(10)
    inside = (whole != FOREIGN) & (tokens >= covered.start) & (tokens < covered.stop)
    return np.where(inside, whole, UNTOUCHED)


def untouched(layout: KvLayout, rank: int) -> Words:
    return np.full(BLOCKS * layout.rank_block_bytes(rank) // WORD, UNTOUCHED, np.uint64)


def carry_out(
    transfer_plan: TransferPlan, sources: list[Words], sinks: list[Words], window_bytes: int
) -> int:
    # Copy window by window (batch of runs), with groups in any order; return the bytes written.
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
            arrivals.mark_verified(group, pair, first, count)
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
    if src.content is KvContent.PAGES:
        skip -= skip % src.block_tokens
    blocks = [data.draw(some_blocks(-(-tokens // layout.block_tokens))) for layout in layouts]
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
    sources = [source(src, rank, blocks[0]) for rank in range(src.ranks)]
    sinks = [untouched(dst, rank) for rank in range(dst.ranks)]
    wanted = [expected(dst, rank, blocks[1], transfer_plan.tokens) for rank in range(dst.ranks)]
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
def some_blocks(draw: st.DrawFn, count: int) -> list[int]:
    if draw(st.booleans()):
        first = draw(st.integers(0, BLOCKS - count))
        return list(range(first, first + count))
    return draw(st.permutations(range(BLOCKS)))[:count]


@settings(max_examples=50, deadline=None)
@given(layouts=layout_pairs())
def test_source_ranks_with_the_same_heads_send_equal_shares(
    layouts: tuple[KvLayout, KvLayout],
) -> None:
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


@settings(max_examples=100, deadline=None)
@given(layouts=layout_pairs(), tokens=st.integers(1, 20), data=st.data())
def test_plans_between_single_ranks_together_move_every_scalar_once(
    layouts: tuple[KvLayout, KvLayout], tokens: int, data: st.DataObject
) -> None:
    # Each rank plans by itself; `source_ranks` and `sink_ranks` agree on which pairs connect.
    src, dst = layouts
    blocks = [data.draw(some_blocks(-(-tokens // layout.block_tokens))) for layout in layouts]
    sources = [source(src, rank, blocks[0]) for rank in range(src.ranks)]
    sinks = [untouched(dst, rank) for rank in range(dst.ranks)]
    written = 0
    for rank in range(dst.ranks):
        for other in source_ranks(src, dst, rank):
            assert rank in sink_ranks(src, dst, other)
            plan = plan_transfer(src, dst, *blocks, tokens, ranks=Ranks(other, rank))
            written += carry_out(plan, sources, sinks, 1 << 20)
            covered = plan.tokens
    wanted = [expected(dst, rank, blocks[1], covered) for rank in range(dst.ranks)]
    for rank in range(dst.ranks):
        np.testing.assert_array_equal(sinks[rank], wanted[rank], f"rank {rank}")
    assert written == WORD * sum(int((memory != UNTOUCHED).sum()) for memory in wanted)
    assert sink_ranks(src, dst, None) == list(range(dst.ranks))
