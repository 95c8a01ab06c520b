"""Reads vLLM's KV cache: the facts that describe its layout, and the memory for transfers.

cache_layout.py decides which caches are supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvtransfer.engines.vllm.cache_layout import (
    CacheFacts,
    LayerView,
    UnsupportedCache,
    find_memory,
)
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.memory_regions import Region

# vLLM frees or replaces blocks of other kinds of caches while a request runs.
_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")


def read_facts(config: Any, caches: Any) -> CacheFacts:
    """Return the facts that describe the KV cache, from vLLM's VllmConfig and KVCacheConfig.

    Raises UnsupportedCache for a kind of cache that cannot be transferred.
    """
    group = _transferred_group(caches)
    parallel, spec = config.parallel_config, group.kv_cache_spec
    latent = type(spec).__name__ == "MLAAttentionSpec"
    _refuse_unsupported(parallel, spec, latent)
    backend = _attention_backend(config, group)
    kind = config.cache_config.cache_dtype
    return CacheFacts(
        backend=backend,
        order=caches.kv_cache_layout or config.cache_config.get_resolved_kv_cache_layout().name,
        dtype=str(spec.dtype).removeprefix("torch.") if kind == "auto" else kind,
        layers=len(caches.kv_cache_tensors[0].layers),
        blocks=caches.num_blocks,
        block_tokens=spec.block_size,
        kv_heads=config.model_config.get_total_num_kv_heads(),
        head_size=spec.head_size,
        cell_bytes=spec.state_content_size_bytes,
        tp=parallel.tensor_parallel_size,
        latent=latent,
        page_format=_page_format(config, spec) if backend == "CPU_ATTN" else "",
    )


def read_window(caches: Any) -> int:
    """Return the sliding window that all layers have, in tokens; 0 if vLLM keeps all blocks.

    Raises UnsupportedCache for several cache groups. `caches` is vLLM's KVCacheConfig.
    """
    spec = _transferred_group(caches).kv_cache_spec
    return int(spec.sliding_window) if type(spec).__name__ == "SlidingWindowSpec" else 0


def _transferred_group(caches: Any) -> Any:
    # Return the only group of layers whose KV is transferred. It must be in one tensor.
    groups = [group for group in caches.kv_cache_groups if group.enable_kv_transfer]
    if len(groups) != 1 or len(caches.kv_cache_tensors) != 1:
        raise UnsupportedCache(
            f"a KV cache with {len(groups)} cache groups in {len(caches.kv_cache_tensors)} "
            "tensors is not supported"
        )
    return groups[0]


def _refuse_unsupported(parallel: Any, spec: Any, latent: bool) -> None:
    name = type(spec).__name__
    if name not in _SUPPORTED_SPECS:
        raise UnsupportedCache(f"a cache of vLLM's class {name} is not supported")
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise UnsupportedCache(
            "pipeline parallelism and decode context parallelism are not supported"
        )
    if getattr(spec, "page_size_padded", None) or spec.num_head_slots is not None:
        raise UnsupportedCache("a KV cache with padded pages or packed heads is not supported")
    if not latent and spec.head_size_v != spec.head_size:
        raise UnsupportedCache(
            "a KV cache whose keys and values have different sizes is not supported"
        )


def _attention_backend(config: Any, group: Any) -> str:
    # Return the name of the attention backend, which must be the same for all layers.
    backends = get_current_attn_backends(config, group.layer_names)
    name, *others = {backend.get_name() for backend in backends}
    if others:
        raise UnsupportedCache(
            f"the layers use several attention backends ({name}, {others}), which is not supported"
        )
    return str(name)


def _page_format(config: Any, spec: Any) -> str:
    dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
    return f"cpu-{_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)}"


def cache_region(layout: KvLayout, tensors: Sequence[Any], name: str) -> Region:
    """Return the KV memory of the layers' tensors as one Region, from which KV is sent and
    received.

    Raises UnsupportedCache if the memory is not on the host, or not contiguous.
    """
    views = []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedCache(
                f"KV on the device {tensor.device.type} is not supported, only host memory is"
            )
        size = tensor.element_size()
        steps = tuple(step * size for step in tensor.stride()[:-1])
        shape = (*tensor.shape[:-1], tensor.shape[-1] * size)
        if tensor.stride()[-1] != 1:
            raise UnsupportedCache(
                "a KV cache in which the scalars of a token are not contiguous is not supported"
            )
        views.append(LayerView(tensor.data_ptr(), tuple(shape), (*steps, 1)))
    address = find_memory(layout, views)
    n_bytes = layout.blocks * layout.rank_block_bytes(0)
    # The engine owns the memory and lives longer than the agent.
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)
    return Region.over(np.ctypeslib.as_array(memory), layout.rank_block_bytes(0), name=name)
