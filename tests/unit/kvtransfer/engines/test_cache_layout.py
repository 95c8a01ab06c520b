"""Tests that the memory layout of vLLM's KV cache is described correctly for known attention
backends.

Caches of other backends are refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvtransfer.engines.vllm.cache_layout import (
    CacheFacts,
    LayerView,
    UnsupportedCache,
    describe_cache,
    find_memory,
)
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder
from tools.kv_layouts import CONNECTOR_REFUSALS, ConnectorRefusal

CPU = CacheFacts(
    backend="CPU_ATTN",
    order="LBHNC",
    dtype="float32",
    layers=2,
    blocks=9,
    block_tokens=4,
    kv_heads=2,
    head_size=8,
    cell_bytes=64,
    tp=1,
    page_format="cpu-vec",
)
FLASH = replace(CPU, backend="FLASH_ATTN", dtype="bfloat16", cell_bytes=32, page_format="")


def views(layout: KvLayout) -> list[LayerView]:
    # Return the layers of an array that vLLM would allocate for this layout.
    cell = layout.parts * layout.row_bytes
    sizes = {
        "l": layout.layers,
        "b": layout.blocks,
        "h": layout.rank_heads,
        "n": layout.block_tokens,
        "c": cell,
    }
    memory = np.zeros([sizes[axis] for axis in layout.order], np.uint8)
    logical = memory.transpose(*(layout.order.index(axis) for axis in "lbhnc"))
    return [
        LayerView(layer.__array_interface__["data"][0], layer.shape, layer.strides)
        for layer in logical
    ]


def test_the_backend_decides_where_keys_and_values_lie() -> None:
    layout = describe_cache(CPU)
    assert (layout.order, layout.content) == (KvOrder.LBHNC, KvContent.PAGES)
    assert (layout.dtype, layout.blocks, layout.scale_bytes) == (KvDtype.FP32, 9, 0)
    assert describe_cache(FLASH).content is KvContent.TOKENS
    assert describe_cache(CPU).fingerprint() != describe_cache(FLASH).fingerprint()


def test_pages_of_another_kernel_or_backend_or_size_are_never_converted() -> None:
    mine = describe_cache(CPU)
    assert mine.mismatch(describe_cache(replace(CPU, tp=2))) is None
    for change, reason in (
        ({"page_format": "cpu-amx"}, "page_format differs: cpu-vec here, cpu-amx there"),
        ({"block_tokens": 8}, "block_tokens differs: 4 here, 8 there"),
        ({"backend": "FLASH_ATTN", "page_format": ""}, "content differs: pages here, tokens there"),
    ):
        assert mine.mismatch(describe_cache(replace(CPU, **change))) == reason


def test_scales_that_lie_beside_their_scalars_are_part_of_a_row() -> None:
    facts = replace(
        CPU, backend="TRITON_ATTN", dtype="int8_per_token_head", cell_bytes=24, page_format=""
    )
    layout = describe_cache(facts)
    assert (layout.dtype, layout.scale_bytes, layout.row_bytes) == (KvDtype.INT8, 4, 12)


def test_a_latent_cache_has_one_row_per_token_on_every_rank() -> None:
    facts = replace(FLASH, backend="FLASHMLA", latent=True, head_size=576, cell_bytes=1152, tp=4)
    layout = describe_cache(facts)
    assert (layout.mla, layout.kv_heads, layout.parts, layout.rank_heads) == (True, 1, 1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"backend": "TURBOQUANT"}, "TURBOQUANT is unknown; known"),
        ({"backend": "AMX_MLA", "latent": True}, "AMX_MLA is unknown; known"),
        ({"dtype": "nvfp4"}, "type nvfp4"),
        ({"dtype": "fp8_per_token_head"}, "backend CPU_ATTN stores its scales"),
        ({"cell_bytes": 72}, "takes 72 bytes in vLLM's KV cache, but 64 bytes"),
        ({"order": "NHBLC"}, "is not a valid KvOrder"),
        ({"order": "LBNHC"}, "cannot combine the content pages"),
        ({"page_format": ""}, "page_format must be"),
        ({"backend": "FLASH_ATTN"}, "page_format must be"),
        ({"tp": 3}, "neither split nor repeated"),
    ],
)
def test_a_cache_that_cannot_be_described_is_refused(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedCache, match=reason):
        describe_cache(replace(CPU, **change))


@pytest.mark.parametrize("refusal", CONNECTOR_REFUSALS, ids=lambda refusal: refusal.message)
def test_a_cache_that_the_page_of_layouts_calls_refused_is_refused(
    refusal: ConnectorRefusal,
) -> None:
    with pytest.raises(UnsupportedCache, match=refusal.message):
        describe_cache(replace(CPU, **refusal.changes))


@pytest.mark.parametrize("order", KvOrder)
def test_memory_is_found_in_every_order(order: KvOrder) -> None:
    layout = describe_cache(replace(FLASH, order=order.value))
    layers = views(layout)
    assert find_memory(layout, layers) == layers[0].address


def test_memory_that_is_not_where_the_layout_says_is_refused() -> None:
    layout = describe_cache(CPU)
    first, second = views(layout)
    assert find_memory(layout, [first, second]) == first.address
    for wrong in (
        [first],
        [second, first],
        [first, second._replace(steps=(256, 64, 128, 1))],
        [first, second._replace(shape=(9, 2, 8, 32))],
        [first, second._replace(address=second.address + 64)],
    ):
        with pytest.raises(UnsupportedCache, match=r"layer \d has the shape|1 layers have"):
            find_memory(layout, wrong)


def test_a_step_along_an_axis_of_one_does_not_count() -> None:
    layout = describe_cache(replace(CPU, kv_heads=1))
    layers = [view._replace(steps=(view.steps[0], 7, *view.steps[2:])) for view in views(layout)]
    assert find_memory(layout, layers) == layers[0].address
