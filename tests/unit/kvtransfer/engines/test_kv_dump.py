"""Tests of the files to which engines write their KV for comparison: all bytes, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtransfer.engines.vllm.kv_dump import KvDump
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder

FIELDS = {
    "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": KvDtype.FP32, "block_tokens": 4, "blocks": 3,
}  # fmt: skip
PAGE_BYTES = 4 * 2 * 8 * 4


def test_a_dump_has_the_heads_of_the_blocks_asked_for(tmp_path: Path) -> None:
    layout = KvLayout(**FIELDS, order=KvOrder.LBHNC, content=KvContent.HEADS)
    memory = np.arange(layout.blocks * layout.rank_block_bytes(0)).astype(np.uint8)
    dump = KvDump(tmp_path / "new", layout, 1, memory)
    dump.save("offered", "r/1", [2, 0])
    found = np.load(tmp_path / "new" / "offered-r%2F1-1.npy")
    pages = memory.reshape(2, 3, 2, PAGE_BYTES)
    assert np.array_equal(found, pages[:, [2, 0]])


def test_a_dump_has_a_row_per_token_if_its_keys_and_values_lie_side_by_side(tmp_path: Path) -> None:
    layout = KvLayout(**FIELDS, order=KvOrder.LBNHC, content=KvContent.TOKENS)
    memory = np.arange(layout.blocks * layout.rank_block_bytes(0)).astype(np.uint8)
    KvDump(tmp_path, layout, 0, memory).save("received", "r", [1])
    rows = memory.reshape(2, 3, 4, 2, 2 * 8 * 4).transpose(0, 1, 3, 2, 4)
    assert np.array_equal(np.load(tmp_path / "received-r-0.npy"), rows[:, [1]])


def test_a_layout_whose_heads_are_scattered_is_refused(tmp_path: Path) -> None:
    layout = KvLayout(**FIELDS)
    with pytest.raises(ValueError, match="planes"):
        KvDump(tmp_path, layout, 0, np.zeros(1, np.uint8))
