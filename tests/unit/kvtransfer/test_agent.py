"""Agents that cannot be: what their constructor refuses before anybody could write into the wrong place."""

from __future__ import annotations

import pytest

from kvtransfer.agent import Agent
from kvtransfer.layout import KvDtype, KvLayout
from kvtransfer.regions import Region
from kvtransfer.transports.tcp import Tcp

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4, tp=2)
BLOCK = LAYOUT.rank_block_bytes(0)


@pytest.mark.parametrize("sizes", [[BLOCK], [BLOCK, BLOCK, BLOCK], [BLOCK, 2 * BLOCK], [BLOCK // 2, BLOCK // 2]])
def test_regions_must_be_those_of_the_layout(sizes: list[int]) -> None:
    regions = [Region.over(bytearray(4 * size), size, name="rank") for size in sizes]
    with pytest.raises(ValueError, match="rank"):
        Agent("p", LAYOUT, regions, key=b"k" * 32, transports=[Tcp()])
