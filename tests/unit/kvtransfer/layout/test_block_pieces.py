"""Tests that the memory pieces of a KV block are where the strides of the layout place them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.layout.block_pieces import BlockPieces, block_format
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder

BLOCKS = 5


def layouts() -> Iterator[KvLayout]:
    for order, content, tp in itertools.product(KvOrder, KvContent, (1, 2)):
        try:
            yield KvLayout(
                3, kv_heads=4, head_dim=2, dtype=KvDtype.BF16, block_tokens=4, tp=tp, order=order,
                content=content, blocks=BLOCKS, page_format="p" * (content is KvContent.PAGES),
            )  # fmt: skip
        except ValueError:  # a content that is not possible in this order
            continue
    for order in KvOrder:
        yield KvLayout(
            2, kv_heads=1, head_dim=3, dtype=KvDtype.FP32, block_tokens=4, mla=True, order=order,
            content=KvContent.TOKENS, blocks=BLOCKS,
        )  # fmt: skip


def bytes_of(layout: KvLayout, block: int) -> set[int]:
    # Return the places of all bytes of a block, by the layout's strides alone.
    steps, found = layout.steps(0), set()
    for layer, part, head, token in itertools.product(
        range(layout.layers), range(layout.parts), range(layout.rank_heads), range(4)
    ):
        row = (
            layer * steps.layer + block * steps.block + part * steps.part
            + head * steps.head + token * steps.token
        )  # fmt: skip
        found |= set(range(row, row + layout.row_bytes))
    return found


@pytest.mark.parametrize("layout", list(layouts()), ids=lambda each: f"{each.order}-{each.content}")
def test_the_pieces_of_a_block_are_exactly_its_bytes(layout: KvLayout) -> None:
    memory = np.zeros(BLOCKS * layout.rank_block_bytes(0), np.uint8)
    pieces = BlockPieces(layout, 0)
    for block in range(BLOCKS):
        memory[:] = 0
        for piece in pieces.of(memory.data, block):
            assert not any(piece), "two pieces overlap"
            piece[:] = b"\1" * len(piece)
        assert set(np.flatnonzero(memory).tolist()) == bytes_of(layout, block)


def test_a_block_that_is_contiguous_is_one_piece() -> None:
    layout = KvLayout(3, kv_heads=2, head_dim=2, dtype=KvDtype.BF16, block_tokens=4)
    assert len(BlockPieces(layout, 0).of(memoryview(bytearray(1000)), 1)) == 1


def test_the_format_of_blocks_covers_all_of_a_layout_but_the_number_of_blocks() -> None:
    layout = KvLayout(3, kv_heads=2, head_dim=2, dtype=KvDtype.BF16, block_tokens=4, blocks=9)
    assert block_format(layout) == block_format(replace(layout, blocks=10))
    others = [
        replace(layout, tp=2),
        replace(layout, dtype=KvDtype.FP16),
        replace(layout, block_tokens=8),
        replace(layout, order=KvOrder.LBHNC),
        replace(layout, content=KvContent.TOKENS),
        replace(layout, content=KvContent.PAGES, page_format="cpu-vec"),
        replace(layout, content=KvContent.PAGES, page_format="cpu-amx"),
    ]
    assert len({block_format(each) for each in (layout, *others)}) == 8
