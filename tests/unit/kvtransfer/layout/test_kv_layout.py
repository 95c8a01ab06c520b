"""Tests of KV layouts: sizes of known models, and incompatible layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder, KvSteps

LLAMA_70B = KvLayout(layers=80, kv_heads=8, head_dim=128, dtype=KvDtype.BF16, block_tokens=16, tp=4)
DEEPSEEK_V3 = KvLayout(
    layers=61, kv_heads=1, head_dim=576, dtype=KvDtype.BF16, block_tokens=64, tp=8, mla=True
)


def test_llama_70b_takes_320_kib_per_token() -> None:
    assert LLAMA_70B.bytes_per_token == 320 << 10
    assert LLAMA_70B.rank_layer_bytes == 16 * (1 << 10)
    assert LLAMA_70B.rank_block_bytes(0) == LLAMA_70B.rank_block_bytes(3) == 16 * (80 << 10)


def test_beyond_one_head_per_rank_heads_are_repeated() -> None:
    assert (
        replace(LLAMA_70B, tp=16).rank_block_bytes(0)
        == replace(LLAMA_70B, tp=8).rank_block_bytes(0)
        == 640 << 10
    )
    assert [list(replace(LLAMA_70B, tp=16).heads_of(rank)) for rank in (0, 1, 2, 15)] == [
        [0],
        [0],
        [1],
        [7],
    ]
    assert [list(LLAMA_70B.heads_of(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_every_rank_has_the_whole_latent() -> None:
    assert DEEPSEEK_V3.bytes_per_token == 61 * 576 * 2
    assert {DEEPSEEK_V3.rank_block_bytes(rank) for rank in range(8)} == {
        64 * DEEPSEEK_V3.bytes_per_token
    }


def test_stages_share_the_layers_and_ranks_are_numbered_stage_by_stage() -> None:
    layout = replace(LLAMA_70B, layers=7, pp=2)
    assert (layout.layers_of(0), layout.layers_of(1), layout.ranks) == (range(3), range(3, 7), 8)
    assert layout.rank_block_bytes(3) == 3 * layout.rank_layer_bytes
    assert layout.rank_block_bytes(4) == 4 * layout.rank_layer_bytes


@pytest.mark.parametrize("ask", [lambda: LLAMA_70B.layers_of(1), lambda: LLAMA_70B.heads_of(-1)])
def test_ranks_that_are_not_are_refused(ask: Callable[[], range]) -> None:
    with pytest.raises(IndexError, match="there is no"):
        ask()


def test_fp8_halves_a_token() -> None:
    assert replace(LLAMA_70B, dtype=KvDtype.FP8_E4M3).bytes_per_token == 160 << 10


def test_a_fingerprint_is_the_same_everywhere_and_differs_with_every_field() -> None:
    assert LLAMA_70B.fingerprint() == replace(LLAMA_70B).fingerprint() == "1873d2798eaa13df"
    others = [
        replace(LLAMA_70B, **change)
        for change in (
            {"layers": 81},
            {"kv_heads": 4},
            {"head_dim": 64},
            {"dtype": KvDtype.FP16},
            {"block_tokens": 32},
            {"tp": 8},
            {"pp": 2},
            {"order": KvOrder.BLNHC},
            {"content": KvContent.HEADS},
            {"blocks": 9},
            {"scale_bytes": 4},
            {"content": KvContent.PAGES, "page_format": "amx"},
        )
    ]
    assert len({layout.fingerprint() for layout in [LLAMA_70B, DEEPSEEK_V3, *others]}) == 14


def test_ranks_and_blocks_may_differ_but_shape_and_type_may_not() -> None:
    assert (
        LLAMA_70B.mismatch(replace(LLAMA_70B, tp=8, pp=2, block_tokens=64, order=KvOrder.BLNHC))
        is None
    )
    assert LLAMA_70B.mismatch(replace(LLAMA_70B, layers=32)) == "layers differs: 80 here, 32 there"
    assert (
        LLAMA_70B.mismatch(replace(LLAMA_70B, dtype=KvDtype.FP16))
        == "dtype differs: bf16 here, fp16 there"
    )
    assert LLAMA_70B.mismatch(DEEPSEEK_V3) == "mla differs: False here, True there"
    outermost = replace(LLAMA_70B, order=KvOrder.LBHNC, content=KvContent.HEADS, blocks=7)
    assert LLAMA_70B.mismatch(outermost) is None
    assert (
        LLAMA_70B.mismatch(replace(LLAMA_70B, scale_bytes=4))
        == "scale_bytes differs: 0 here, 4 there"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"tp": 3},
        {"mla": True},
        {"kv_heads": 6},
        {"pp": 81},
        {"tp": 1 << 20},
        {"order": KvOrder.LBHNC},
        {"blocks": -1},
        {"scale_bytes": 65},
        {"order": KvOrder.LBNHC, "blocks": 9, "content": KvContent.HEADS},
        {"order": KvOrder.LHBNC, "blocks": 9},
        {"order": KvOrder.BHLNC},
        {"content": KvContent.PAGES},
        {"page_format": "amx"},
        {"content": KvContent.PAGES, "page_format": "x" * 65},
        {"content": KvContent.PAGES, "page_format": "amx", "order": KvOrder.BLNHC},
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(
        ValueError,
        match=r"must be|too few|neither split|one head|by their total number|negative or too large|cannot combine|short name",
    ):
        replace(LLAMA_70B, **wrong)


def test_a_layer_of_a_block_is_the_same_bytes_only_where_nothing_inside_it_differs() -> None:
    assert LLAMA_70B.has_same_blocks(replace(LLAMA_70B, pp=2))
    assert replace(LLAMA_70B, tp=8).has_same_blocks(replace(LLAMA_70B, tp=16))
    changes = ({"tp": 8}, {"block_tokens": 32}, {"order": KvOrder.BLNHC})
    for change in (*changes, {"content": KvContent.HEADS}):
        assert not LLAMA_70B.has_same_blocks(replace(LLAMA_70B, **change))


@pytest.mark.parametrize(
    ("order", "content", "steps"),
    [
        (KvOrder.BLHNC, KvContent.PLANES, KvSteps(96, 192, 48, 24, 8)),
        (KvOrder.LBHNC, KvContent.HEADS, KvSteps(480, 96, 24, 48, 8)),
        (KvOrder.LBNHC, KvContent.TOKENS, KvSteps(480, 96, 8, 16, 32)),
        (KvOrder.LHBNC, KvContent.HEADS, KvSteps(480, 48, 24, 240, 8)),
        (KvOrder.BHLNC, KvContent.TOKENS, KvSteps(48, 192, 8, 96, 16)),
    ],
)
def test_the_steps_through_memory_follow_the_order_and_the_place_of_the_values(
    order: KvOrder, content: KvContent, steps: KvSteps
) -> None:
    layout = KvLayout(
        2, kv_heads=2, head_dim=4, dtype=KvDtype.FP16, block_tokens=3, order=order,
        content=content, blocks=5,
    )  # fmt: skip
    assert layout.steps(0) == steps
