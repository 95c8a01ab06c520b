"""A process that creates KV caches with vLLM's own classes, without an engine.

It creates them as vLLM's workers do, in files that another process can map. It reads and writes
rows where vLLM's attention backend has them. Commands from stdin and replies on stdout are lines of
JSON.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config.cache import CacheConfig
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_bytes_per_block,
    _get_kv_cache_groups_uniform_page_size,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from kvtransfer.engines.vllm.cache_layout import CacheFacts, LayerView, describe_cache, find_memory

BLOCKS = 24


class RankCache:
    """The KV cache of one rank: the tensors [block, head, token, content] of all layers, by
    group.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        layout = KVCacheLayout[order["order"].upper()]
        groups = _get_kv_cache_groups_uniform_page_size(_specs(order))
        n_bytes = _get_kv_cache_bytes_per_block(groups, layout) * BLOCKS
        self.caches = get_kv_cache_config_from_groups(_config(layout), groups, n_bytes)
        assert self.caches.num_blocks == BLOCKS
        self.memory = np.memmap(order["path"], np.int8, "w+", shape=(n_bytes,))
        self.memory[:] = np.random.default_rng(order["rank"]).integers(-128, 128, n_bytes, np.int8)
        raw = torch.from_numpy(self.memory)
        self.groups = [
            create_kv_cache_views(raw, group.kv_cache_spec, BLOCKS, layout, tensor)
            for group, tensor in zip(groups, self.caches.kv_cache_tensors, strict=True)
        ]
        self.scales: dict[int, tuple[Any, Any]] = {}
        for views in self.groups:
            self._find_scales(views)

    def _find_scales(self, views: list[torch.Tensor]) -> None:
        if self.order["cache_type"].endswith("_per_token_head"):
            for view in views:
                impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
                impl._ensure_scale_caches(view)
                self.scales[view.data_ptr()] = impl._k_scale_cache, impl._v_scale_cache

    def layout(self) -> dict[str, Any]:
        """Return the layout of the cache, which is the same for all groups of layers.

        The tested code of the connector describes it, and compares it with the tensors.
        """
        layouts = []
        for group, views in zip(self.caches.kv_cache_groups, self.groups, strict=True):
            spec = group.kv_cache_spec
            facts = CacheFacts(
                backend=self.order["backend"],
                order=self.order["order"].upper(),
                dtype=self.order["cache_type"],
                layers=len(views),
                blocks=BLOCKS,
                block_tokens=spec.block_size,
                kv_heads=self.order["kv_heads"],
                head_size=spec.head_size,
                cell_bytes=spec.state_content_size_bytes,
                tp=self.order["tp"],
                latent=self.order["is_latent"],
                page_format=self.order["page_format"],
            )
            layout = describe_cache(facts)
            own = [_layer_view(view) for view in views]
            assert find_memory(layout, own) == self.memory.ctypes.data
            layouts.append(layout)
        assert all(layout == layouts[0] for layout in layouts)
        encoded: dict[str, Any] = msgspec.to_builtins(layouts[0])
        return encoded

    def rows(self, group: int, layer: int, head: int, block: int, part: int) -> list[torch.Tensor]:
        """Return a block's memory as tensors (token, byte): first its numbers, then its scales."""
        view = self.groups[group][layer]
        cells = view[block, head]
        if self.order["is_latent"]:
            return [_bytes(cells)]
        if self.order["backend"] == "CPU_ATTN":
            # A page of a head: its tokens have no known places.
            return [_bytes(cells.view(1, -1))]
        width = view.shape[-1] // 2
        half = cells.split(width, dim=-1)[part]
        if view.data_ptr() not in self.scales:
            return [_bytes(half)]
        scale = self.scales[view.data_ptr()][part][block, :, head]
        return [_bytes(half)[:, : self.order["head_dim"]], _bytes(scale[:, None])]


def _bytes(cells: torch.Tensor) -> torch.Tensor:
    return cells.view(torch.uint8)


def _layer_view(view: torch.Tensor) -> LayerView:
    size = view.element_size()
    shape = (*view.shape[:-1], view.shape[-1] * size)
    steps = (*(step * size for step in view.stride()[:-1]), 1)
    return LayerView(view.data_ptr(), tuple(shape), steps)


def _specs(order: dict[str, Any]) -> dict[str, Any]:
    kind = order["cache_type"]
    common = {
        "block_size": order["block_tokens"],
        "num_kv_heads": max(1, order["kv_heads"] // order["tp"]),
        "head_size": order["head_dim"],
        "dtype": getattr(torch, kind, None) or STR_DTYPE_TO_TORCH_DTYPE[kind],
        "kv_quant_mode": get_kv_quant_mode(kind),
    }
    specs: dict[str, Any] = {}
    for index, window in enumerate(order["windows"] or [0]):
        if order["is_latent"]:
            spec: Any = MLAAttentionSpec(**common, cache_dtype_str=kind)
        elif window:
            spec = SlidingWindowSpec(**common, sliding_window=window)
        else:
            spec = FullAttentionSpec(**common)
        if order["backend"] == "TRITON_ATTN":
            spec = TritonAttentionBackend.customize_spec(spec)
        specs |= {f"{index}.{layer}": spec for layer in range(order["layers"])}
    return specs


def _config(layout: KVCacheLayout) -> Any:
    # Return the part of vLLM's configuration from which it places groups in memory.
    cache = CacheConfig()
    cache.get_resolved_kv_cache_layout = lambda: layout  # type: ignore[method-assign]
    return SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None)
    )


class Caches:
    def __init__(self) -> None:
        self.caches: dict[str, RankCache] = {}

    def create(self, **order: Any) -> dict[str, Any]:
        cache = self.caches[order["path"]] = RankCache(order)
        return cache.layout()

    def write(self, path: str, group: int, blocks: list[int], heads: list[int], rows: str) -> None:
        """Write rows [layer, part, head, token, byte]. A rank writes only its own `heads`.

        For a cache of pages, the rows are [layer, 1, head, block, byte].
        """
        for there, tensors in self._places(path, group, blocks, heads, np.load(rows)):
            begin = 0
            for tensor in tensors:
                width = tensor.shape[1]
                tensor.copy_(torch.from_numpy(there[:, begin : begin + width].copy()))
                begin += width

    def differing(
        self, path: str, group: int, blocks: list[int], heads: list[int], rows: str
    ) -> int:
        """Return for how many blocks of a head the cache differs from these rows."""
        return sum(
            not np.array_equal(torch.cat(list(tensors), dim=1).numpy(), there)
            for there, tensors in self._places(path, group, blocks, heads, np.load(rows))
        )

    def _places(self, path: str, group: int, blocks: list[int], heads: list[int], rows: Any) -> Any:
        cache = self.caches[path]
        layers, parts, _, tokens, _ = rows.shape
        size = 1 if cache.order["backend"] == "CPU_ATTN" else cache.order["block_tokens"]
        for layer in range(layers):
            for local, head in enumerate(heads):
                for part in range(parts):
                    for index in range(-(-tokens // size)):
                        there = rows[layer, part, head, index * size : (index + 1) * size]
                        tensors = cache.rows(group, layer, local, blocks[index], part)
                        yield there, [tensor[: len(there)] for tensor in tensors]

    def forget(self) -> None:
        self.caches.clear()


def main() -> None:
    caches = Caches()
    replies = sys.stdout
    sys.stdout = sys.stderr  # vLLM logs to stdout, which must have only the result
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"ok": getattr(caches, command.pop("do"))(**command)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
