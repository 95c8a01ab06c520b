"""Tests each pair of memory layouts in the documentation's table by a real KV transfer.

It moves real bytes between two processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from tests.contract.kvtransfer.layouts.rank_memory import (
    BLOCKS,
    HEAD_DIM,
    LATENT_DIM,
    LAYERS,
    Bytes,
    Request,
    Shape,
    create,
    requests_of,
    shape_of,
)
from tests.contract.kvtransfer.layouts.two_engines import Part, TwoEngines
from tools.kv_layouts import ROWS, TP_PAIRS, LayoutRow

CASES = [(row, cache_type) for row in ROWS for cache_type in row.cache_types]


def case_id(value: object) -> str:
    if isinstance(value, LayoutRow):
        ends = "-".join(
            f"{m.content}.{m.order}.{m.block_tokens}" for m in (value.source, value.sink)
        )
        return f"{value.cache.split(':')[0]}-{ends}"
    return str(value)


@pytest.fixture(scope="module")
def engines() -> Iterator[TwoEngines]:
    both = TwoEngines()
    yield both
    both.end()


def layout_of(shape: Shape) -> KvLayout:
    return KvLayout(
        LAYERS,
        shape.kv_heads,
        LATENT_DIM if shape.is_latent else HEAD_DIM,
        KvDtype(shape.kind.dtype),
        shape.memory.block_tokens,
        tp=shape.tp,
        mla=shape.is_latent,
        order=KvOrder(shape.memory.order),
        content=KvContent(shape.memory.content),
        blocks=BLOCKS,
        scale_bytes=shape.kind.scale_bytes,
        page_format=shape.memory.page_format,
    )


def written(shape: Shape, memories: list[Bytes], requests: list[Request], *, at_sink: bool) -> None:
    for rank, memory in enumerate(memories):
        view = shape.view(memory)
        for request in requests:
            blocks = request.dst_blocks if at_sink else request.src_blocks
            for place, data in request.places(shape, rank, blocks):
                view[place] = data


def differing_heads(shape: Shape, wanted: list[Bytes], have: list[Bytes]) -> list[str]:
    return [
        f"rank {rank}, layer {layer}, head {head}"
        for rank in range(shape.tp)
        for layer in range(LAYERS)
        for local, head in enumerate(shape.heads_of(rank))
        if not np.array_equal(
            shape.view(wanted[rank])[layer, :, local], shape.view(have[rank])[layer, :, local]
        )
    ]


@pytest.mark.parametrize("pair", TP_PAIRS, ids=lambda p: f"{p[0]}to{p[1]}")
@pytest.mark.parametrize(("row", "cache_type"), CASES, ids=case_id)
def test_every_head_arrives_where_the_sink_has_it_and_nothing_else_changes(
    row: LayoutRow, cache_type: str, pair: tuple[int, int], engines: TwoEngines, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    src, dst = (
        shape_of(row.kv_heads, row.is_latent, memory, cache_type, tp)
        for memory, tp in zip((row.source, row.sink), pair, strict=True)
    )
    sources, sinks = create(tmp_path, "p", src, rng), create(tmp_path, "d", dst, rng)
    made = requests_of(row, src, rng)
    written(src, sources, made, at_sink=False)
    wanted = [memory.copy() for memory in sinks]
    if not row.refusal:
        written(dst, wanted, made, at_sink=True)
    ends = engines.move(
        (layout_of(src), layout_of(dst)),
        ([str(m.filename) for m in sources], [str(m.filename) for m in sinks]),
        [Part(request.tokens, request.src_blocks, request.dst_blocks) for request in made],
    )
    assert differing_heads(dst, wanted, sinks) == []
    if row.refusal:
        assert all(reason == "layout_mismatch" for _, reason, _ in ends), ends
        assert all(row.refusal in detail for _, _, detail in ends), ends
    else:
        assert {kind for kind, _, _ in ends} == {"landed"}, ends


@pytest.mark.parametrize(
    "wrong", [{"content": KvContent.PLANES}, {"order": KvOrder.LHBNC}, {"order": KvOrder.LBHNC}]
)
def test_the_comparison_finds_a_layout_that_is_not_that_of_the_memory(
    wrong: dict[str, str], engines: TwoEngines, tmp_path: Path
) -> None:
    row = next(row for row in ROWS if row.source.order == row.sink.order == "lbnhc")
    rng = np.random.default_rng(7)
    src, dst = (shape_of(8, False, row.source, "bfloat16", tp) for tp in (2, 4))
    sources, sinks = create(tmp_path, "p", src, rng), create(tmp_path, "d", dst, rng)
    made = requests_of(row, src, rng)
    written(src, sources, made, at_sink=False)
    wanted = [memory.copy() for memory in sinks]
    written(dst, wanted, made, at_sink=True)
    engines.move(
        (replace(layout_of(src), **wrong), layout_of(dst)),
        ([str(m.filename) for m in sources], [str(m.filename) for m in sinks]),
        [Part(request.tokens, request.src_blocks, request.dst_blocks) for request in made],
    )
    assert differing_heads(dst, wanted, sinks)
