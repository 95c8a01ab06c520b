"""Model shapes and their sizes: weights, KV per token, and KV capacity of a TP group.

Shapes are the models' published configurations. Not here: times (roofline.py), rates of GPUs
(mockgpu/gpus.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from mockgpu.gpus import Gpu

GIB = 1 << 30


class Reserve(msgspec.Struct, frozen=True):
    """GPU memory that is not for weights and KV: the untouched share, and the engine's own use."""

    untouched: float = 0.1
    engine_bytes: float = 3.5 * GIB
    nccl_bytes: float = 0.36 * GIB

    def usable(self, gpu: Gpu, tp: int) -> float:
        """Return the bytes per GPU for weights and KV."""
        return (
            gpu.hbm_bytes * (1 - self.untouched)
            - self.engine_bytes
            - (self.nccl_bytes if tp > 1 else 0)
        )


# vLLM's gpu_memory_utilization of 0.9, and aiconfigurator's figures for context, activations,
# graphs and NCCL.
ENGINE_RESERVE = Reserve()
RULE_OF_THUMB = Reserve(engine_bytes=0, nccl_bytes=0)


class Llm(msgspec.Struct, frozen=True):
    """A decoder's shape.

    kv_scalars     scalars cached per token and layer: 2 x kv_heads x head_dim, or MLA's latent
    shardable_kv   ranks that can split the cache: kv_heads for GQA, 1 for MLA (all on each rank)
    """

    name: str
    layers: int
    width: int
    heads: int
    head_dim: int
    kv_scalars: int
    shardable_kv: int
    params: float
    active_params: float
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    max_context: int = 131_072
    grid_name: str = ""

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights."""
        return self.params * self.weight_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of one token's hidden state, as all-reduced and passed between stages."""
        return 2 * self.width

    @property
    def allreduces(self) -> int:
        """Collectives per step of a TP group: after attention and after the MLP of each layer."""
        return 2 * self.layers

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV cache per token, over all layers and KV heads."""
        return int(self.layers * self.kv_scalars * self.kv_bytes)

    @property
    def mla(self) -> bool:
        """Whether the cache is one latent per token instead of keys and values per head."""
        return self.shardable_kv == 1 and self.kv_scalars != 2 * self.head_dim

    def kv_rank_bytes(self, tp: int) -> float:
        """Return bytes of KV per token on one rank.

        Beyond `shardable_kv` ranks, heads are replicated.
        """
        return self.kv_token_bytes / min(tp, self.shardable_kv)


def gqa(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    params: float,
    grid_name: str = "",
) -> Llm:
    """Return a dense bf16 model with grouped-query attention and heads of 128."""
    return Llm(
        name,
        layers,
        width,
        heads,
        128,
        2 * kv_heads * 128,
        kv_heads,
        params,
        params,
        grid_name=grid_name,
    )


def fp8(model: Llm, name: str, grid_name: str = "") -> Llm:
    """Return the same model with one-byte weights. The cache stays bf16, as in vLLM's default."""
    return msgspec.structs.replace(model, name=name, weight_bytes=1.0, grid_name=grid_name)


def _table() -> dict[str, Llm]:
    small = gqa("meta-llama/Llama-3.1-8B-Instruct", 32, 4096, 32, 8, 8.03e9, "Meta-Llama-3.1-8B")
    large = gqa("meta-llama/Llama-3.1-70B-Instruct", 80, 8192, 64, 8, 70.6e9, "Meta-Llama-3.1-70B")
    huge = gqa(
        "meta-llama/Llama-3.1-405B-Instruct", 126, 16384, 128, 8, 405.9e9, "Meta-Llama-3.1-405B"
    )
    large_fp8 = fp8(large, "meta-llama/Llama-3.1-70B-Instruct-FP8", "Llama-3.1-70B-Instruct-FP8")
    huge_fp8 = fp8(huge, "meta-llama/Llama-3.1-405B-Instruct-FP8")
    qwen = msgspec.structs.replace(
        gqa("Qwen/Qwen3-32B", 64, 5120, 64, 8, 32.8e9), max_context=40_960
    )
    llama2 = msgspec.structs.replace(
        gqa("meta-llama/Llama-2-13b", 40, 5120, 40, 40, 13.0e9), max_context=4_096
    )
    mla = Llm(
        "deepseek-ai/DeepSeek-V3",
        61,
        7168,
        128,
        192,
        576,
        1,
        671e9,
        37e9,
        weight_bytes=1.0,
        max_context=163_840,
    )
    short = {
        "demo-8b": small,
        "llama-3.1-8b": small,
        "llama-3.1-70b": large,
        "llama-3.1-70b-fp8": large_fp8,
        "llama-3.1-405b": huge,
        "llama-3.1-405b-fp8": huge_fp8,
        "qwen3-32b": qwen,
        "llama-2-13b": llama2,
        "deepseek-v3": mla,
    }
    return short | {model.name.lower(): model for model in short.values()}


MODELS: Mapping[str, Llm] = MappingProxyType(_table())


def model_named(name: str) -> Llm:
    """Return the shape for a short or full model name, in any case. Raises ValueError."""
    model = MODELS.get(name.lower())
    if model is None:
        raise ValueError(f"unknown model {name!r}: known are {', '.join(MODELS)}")
    return model


def free_kv_bytes(model: Llm, gpu: Gpu, tp: int, reserve: Reserve = ENGINE_RESERVE) -> float:
    """Return the bytes left for KV on one rank; negative if the weights do not fit."""
    return reserve.usable(gpu, tp) - model.weights_bytes / tp


def kv_capacity_tokens(model: Llm, gpu: Gpu, tp: int, reserve: Reserve = ENGINE_RESERVE) -> int:
    """Return the tokens of KV that a TP group holds; 0 if the weights do not fit."""
    return max(0, int(free_kv_bytes(model, gpu, tp, reserve) / model.kv_rank_bytes(tp)))
