"""KV layouts: sizes of known models, and what may not be mixed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvtransfer.layout import KvDtype, KvLayout

LLAMA_70B = KvLayout(layers=80, kv_heads=8, head_dim=128, dtype=KvDtype.BF16, block_tokens=16, tp=4)
DEEPSEEK_V3 = KvLayout(layers=61, kv_heads=1, head_dim=576, dtype=KvDtype.BF16, block_tokens=64, tp=8, mla=True)


def test_llama_70b_takes_320_kib_per_token() -> None:
    assert LLAMA_70B.bytes_per_token == 320 << 10
    assert LLAMA_70B.rank_bytes_per_token == 80 << 10
    assert LLAMA_70B.block_bytes == 16 * (80 << 10)


def test_beyond_one_head_per_rank_heads_are_repeated() -> None:
    assert replace(LLAMA_70B, tp=16).rank_bytes_per_token == replace(LLAMA_70B, tp=8).rank_bytes_per_token == 40 << 10


def test_a_latent_is_held_whole_by_every_rank() -> None:
    assert DEEPSEEK_V3.bytes_per_token == DEEPSEEK_V3.rank_bytes_per_token == 61 * 576 * 2


def test_fp8_halves_a_token() -> None:
    assert replace(LLAMA_70B, dtype=KvDtype.FP8_E4M3).bytes_per_token == 160 << 10


def test_a_fingerprint_is_the_same_everywhere_and_differs_with_every_field() -> None:
    assert LLAMA_70B.fingerprint() == replace(LLAMA_70B).fingerprint() == "06d245bf1a896a42"
    others = [
        replace(LLAMA_70B, **change)
        for change in (
            {"layers": 81},
            {"kv_heads": 4},
            {"head_dim": 64},
            {"dtype": KvDtype.FP16},
            {"block_tokens": 32},
            {"tp": 8},
        )
    ]
    assert len({layout.fingerprint() for layout in [LLAMA_70B, DEEPSEEK_V3, *others]}) == 8


def test_ranks_and_blocks_may_differ_but_shape_and_type_may_not() -> None:
    assert LLAMA_70B.mismatch(replace(LLAMA_70B, tp=8, block_tokens=64)) is None
    assert LLAMA_70B.mismatch(replace(LLAMA_70B, layers=32)) == "layers differs: 80 here, 32 there"
    assert LLAMA_70B.mismatch(replace(LLAMA_70B, dtype=KvDtype.FP16)) == "dtype differs: bf16 here, fp16 there"
    assert LLAMA_70B.mismatch(DEEPSEEK_V3) == "mla differs: False here, True there"


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"tp": 3}, {"mla": True}, {"kv_heads": 6}])
def test_impossible_shapes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|neither split nor repeated|one head"):
        replace(LLAMA_70B, **wrong)
