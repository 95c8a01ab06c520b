"""Describes vLLM's KV cache in this library's terms: where the KV of each layer and token lies.

vLLM 0.32 stores each cache as [L, B, H, N, C] in one of six orders: layers, blocks, heads, tokens
and content. The attention backend decides how keys and values are arranged inside C.
cache_memory.py reads these facts from vLLM. A cache that cannot be described exactly is refused;
nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout, KvOrder

_CONTENTS: Mapping[str, KvContent] = MappingProxyType(
    {
        "CPU_ATTN": KvContent.PAGES,
        "FLASH_ATTN": KvContent.TOKENS,
        "TRITON_ATTN": KvContent.TOKENS,
        "FLEX_ATTENTION": KvContent.TOKENS,
        "FLASHINFER": KvContent.TOKENS,
    }
)
# Attention backends whose latent cache stores a token's row in one piece.
_LATENT_CONTENTS: Mapping[str, KvContent] = MappingProxyType(
    dict.fromkeys(
        (
            *("CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
            "TRITON_MLA",
        ),
        KvContent.TOKENS,
    )
)
_DTYPES: Mapping[str, KvDtype] = MappingProxyType(
    {
        "float32": KvDtype.FP32,
        "bfloat16": KvDtype.BF16,
        "float16": KvDtype.FP16,
        "fp8": KvDtype.FP8_E4M3,
        "fp8_e4m3": KvDtype.FP8_E4M3,
        "fp8_per_token_head": KvDtype.FP8_E4M3,
        "fp8_e5m2": KvDtype.FP8_E5M2,
        "int8_per_token_head": KvDtype.INT8,
    }
)
_SCALE_BYTES = 4


class UnsupportedCache(Exception):
    """Raised for a KV cache of vLLM whose memory layout this library does not know.

    Its KV can then not be transferred. The message gives the reason.
    """


class CacheFacts(msgspec.Struct, frozen=True):
    """The facts about a vLLM worker's KV cache from which its layout is derived.

    backend      name of the attention backend, such as "CPU_ATTN"
    order        order of the dimensions, such as "LBHNC"
    dtype        data type of the cache, such as "float32" or "fp8_per_token_head"
    kv_heads     number of the model's key/value heads
    cell_bytes   bytes of one head and token (C)
    latent       True for multi-head latent attention: one row per token instead of keys and values
    page_format  for CPU_ATTN: the instruction set of its kernels, on which the arrangement of keys
                 and values in a page depends
    """

    backend: str
    order: str
    dtype: str
    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_size: int
    cell_bytes: int
    tp: int
    latent: bool = False
    page_format: str = ""


class LayerView(NamedTuple):
    """The place in memory of one layer's KV: a tensor [B, H, N, C] (blocks, heads, tokens,
    content).

    address  address of its first byte
    shape    its sizes; that of C in bytes
    steps    its strides in bytes
    """

    address: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]


def _content_of(facts: CacheFacts) -> KvContent:
    contents = _LATENT_CONTENTS if facts.latent else _CONTENTS
    content = contents.get(facts.backend)
    if content is None:
        raise UnsupportedCache(
            f"the KV cache layout of the attention backend {facts.backend} is unknown; known "
            f"backends: {', '.join(sorted(contents))}"
        )
    return content


def describe_cache(facts: CacheFacts) -> KvLayout:
    """Return the KvLayout of a vLLM worker's cache.

    Raises UnsupportedCache if the layout of this kind of cache is not known.
    """
    content = _content_of(facts)
    dtype = _DTYPES.get(facts.dtype)
    if dtype is None:
        raise UnsupportedCache(f"a KV cache with the data type {facts.dtype} is not supported")
    scale_bytes = _SCALE_BYTES if facts.dtype.endswith("_per_token_head") else 0
    if scale_bytes and facts.backend != "TRITON_ATTN":
        raise UnsupportedCache(
            f"it is unknown where the attention backend {facts.backend} stores its scales"
        )
    try:
        layout = KvLayout(
            layers=facts.layers,
            kv_heads=1 if facts.latent else facts.kv_heads,
            head_dim=facts.head_size,
            dtype=dtype,
            block_tokens=facts.block_tokens,
            tp=facts.tp,
            mla=facts.latent,
            order=KvOrder(facts.order.lower()),
            content=content,
            blocks=facts.blocks,
            scale_bytes=scale_bytes,
            page_format=facts.page_format,
        )
    except ValueError as error:
        raise UnsupportedCache(str(error)) from error
    cell = layout.parts * layout.row_bytes
    if cell != facts.cell_bytes:
        raise UnsupportedCache(
            f"one token of one head takes {facts.cell_bytes} bytes in vLLM's KV cache, but "
            f"{cell} bytes by the data type {facts.dtype}"
        )
    return layout


def find_memory(layout: KvLayout, views: Sequence[LayerView]) -> int:
    """Check that the tensors of all layers lie as `layout` says, and return the address of the
    first byte.

    layout  the layout that one rank's memory must have
    views   the tensor of each layer, in the order of the layers

    Raises UnsupportedCache if a tensor is elsewhere, for example because of padded pages or
    separately allocated caches.
    """
    if len(views) != layout.layers:
        raise UnsupportedCache(
            f"{len(views)} layers have a KV cache, but the layout has {layout.layers} layers"
        )
    steps = layout.steps(0)
    cell = layout.parts * layout.row_bytes
    shape = (layout.blocks, layout.rank_heads, layout.block_tokens, cell)
    has_pages = layout.content in (KvContent.HEADS, KvContent.PAGES)
    token = cell if has_pages else steps.token
    wanted = (steps.block, steps.head, token, 1)
    for layer, view in enumerate(views):
        address = views[0].address + layer * steps.layer
        places = [
            (have, want)
            for size, have, want in zip(view.shape, view.steps, wanted, strict=True)
            if size > 1
        ]
        if (
            view.shape != shape
            or view.address != address
            or any(have != want for have, want in places)
        ):
            raise UnsupportedCache(
                f"layer {layer} has the shape {view.shape} with strides {view.steps} at byte "
                f"{view.address - views[0].address}; the layout requires {shape} with {wanted} "
                f"at byte {layer * steps.layer}"
            )
    return views[0].address
