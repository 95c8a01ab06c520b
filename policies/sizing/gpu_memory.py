"""Checks the GPU memory of a layout: do weights fit, and how many requests of a given length?

The main function is `check_memory`. Model shapes are in model_shapes.py, GPUs in gpus.py. The
constants of Reserve have their source and error beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from policies.sizing.gpus import Gpu
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout, layers_of_stages

GIB = 1 << 30


class Reserve(msgspec.Struct, frozen=True):
    """The part of a GPU's memory that cannot be used for weights and KV.

    untouched     share of the memory that the engine leaves free
    engine_bytes  bytes for the engine itself
    nccl_bytes    bytes for NCCL's buffers, if the engine has several ranks
    """

    untouched: float = 0.1
    engine_bytes: float = 3.5 * GIB
    nccl_bytes: float = 0.36 * GIB

    def usable(self, gpu: Gpu, ranks: int) -> float:
        """Return the bytes per GPU that an engine of `ranks` ranks can use for weights and KV."""
        return (
            gpu.hbm_bytes * (1 - self.untouched)
            - self.engine_bytes
            - (self.nccl_bytes if ranks > 1 else 0)
        )


# vLLM's gpu_memory_utilization of 0.9, and aiconfigurator's figures for context, activations,
# graphs and NCCL (0.34 to 0.39 GiB). Engines differ by about 2 GiB, most by the size of a step's
# activations; RESERVE_ERROR_BYTES is printed beside a verdict.
ENGINE_RESERVE = Reserve()
RULE_OF_THUMB = Reserve(engine_bytes=0, nccl_bytes=0)
RESERVE_ERROR_BYTES = 2 * GIB


class MemoryVerdict(Enum):
    """The result of a memory check: do the weights and the KV of a request fit the GPUs?"""

    DOES_NOT_LOAD = "does not load"
    SERVES_NONE = "loads, but serves no request"
    SERVES = "serves"


class Demand(msgspec.Struct, frozen=True):
    """The requests that must fit into GPU memory together.

    context      number of tokens of each request
    concurrency  number of requests
    headroom     share of the KV memory to keep free
    """

    context: int
    concurrency: int = 1
    headroom: float = 0.15


class MemoryCheck(msgspec.Struct, frozen=True):
    """The result of the memory check.

    Bytes are per GPU, in the pipeline stage with the least memory for KV.

    verdict         whether the weights and the requests fit
    demand          the requests that must fit
    weights_bytes   bytes of weights
    usable_bytes    bytes available for weights and KV
    free_bytes      bytes left for KV
    kv_token_bytes  bytes of KV per token
    tokens          tokens of KV that the whole engine can store, in requests of the demanded
                    context
    served          number of requests of that context that fit at the same time
    spare           KV memory left free by the demanded requests, divided by what they need;
                    negative: they do not fit
    """

    verdict: MemoryVerdict
    demand: Demand
    weights_bytes: float
    usable_bytes: float
    free_bytes: float
    kv_token_bytes: float
    tokens: int
    served: int
    spare: float

    @property
    def is_enough(self) -> bool:
        """Return whether the KV cache holds the demanded requests and the demanded headroom."""
        return self.verdict is MemoryVerdict.SERVES and self.spare >= self.demand.headroom

    @property
    def text(self) -> str:
        context, demand = f"{self.demand.context:,} tokens", self.demand
        if self.verdict is MemoryVerdict.DOES_NOT_LOAD:
            return "does not load"
        if self.verdict is MemoryVerdict.SERVES_NONE:
            return f"loads, but serves no request of {context}"
        serves = f"serves {self.served} of {context}"
        if demand.concurrency == 1:
            return serves
        return (
            f"{serves} (wanted {demand.concurrency} with {demand.headroom:.0%} headroom, "
            f"has {self.spare:.1%})"
        )


class Stage(msgspec.Struct, frozen=True):
    """The memory that one pipeline stage of a layout needs, in bytes on each of its GPUs.

    weights_bytes   bytes of weights
    kv_token_bytes  bytes of KV per token
    """

    weights_bytes: float
    kv_token_bytes: float


def stages(model: Llm, layout: Layout) -> Iterator[Stage]:
    """Yield the GPU memory that each pipeline stage of a model needs, from first to last stage."""
    counts = layers_of_stages(model.layers, layout.pp)
    kv_layer_bytes = model.kv_rank_bytes(layout.tp) / model.layers / layout.cp
    start = 0
    for place, layers in enumerate(counts):
        ends = (place == 0, place == layout.pp - 1)
        params = _layer_params(model, layout, start, layers) + _end_params(model, layout, ends)
        yield Stage(params * model.param_bytes, kv_layer_bytes * layers)
        start += layers


def _layer_params(model: Llm, layout: Layout, start: int, layers: int) -> float:
    # Return the parameters that one GPU holds of `layers` layers from `start` on, without
    # embeddings.
    ends = model.embedding_params * (1 if model.is_tied else 2)
    on_each_rank = model.replicated_params + model.state_group_params
    split_params = model.params - ends - model.expert_params - model.kv_proj_params - on_each_rank
    per_layer = (
        split_params / layout.tp + model.kv_proj_params * model.kv_share(layout.tp) + on_each_rank
    ) / model.layers
    total = per_layer * layers
    if model.expert_params:
        first_moe = model.layers - model.moe_layers
        moe_layers = max(0, start + layers - max(start, first_moe))
        ranks = layout.ep if layout.ep > 1 else layout.tp
        total += model.expert_params / model.moe_layers * moe_layers / ranks
    return total


def _end_params(model: Llm, layout: Layout, ends: tuple[bool, bool]) -> float:
    # Return the embedding and output head parameters on one GPU of a stage.
    #
    # `ends` is whether the stage is the first, and whether it is the last.
    copies = 1 if model.is_tied and all(ends) else sum(ends)
    return copies * model.embedding_params / layout.tp


def in_flight_tokens(gpu: Gpu, pp: int) -> int:
    """Return how many tokens vLLM may have in its steps at the same time by default.

    With `pp` pipeline stages, `pp` steps run at a time, and one more is prepared. Source: vLLM
    0.32, `get_batch_defaults` (engine/arg_utils.py), `max_in_flight_tokens` (config/vllm.py).
    """
    step = 2_048
    if gpu.hbm_bytes >= 160 * GIB:
        step = 16_384
    elif gpu.hbm_bytes >= 70 * GIB and gpu.name != "a100":
        step = 8_192
    return (pp + 1) * step


def check_memory(
    model: Llm, gpu: Gpu, layout: Layout, demand: Demand, reserve: Reserve = ENGINE_RESERVE
) -> MemoryCheck:
    """Check whether the GPUs of a layout can store the weights and the KV of the demanded requests.

    The pipeline stage with the least memory for KV decides, because each token needs all stages.
    With data-parallel attention, each rank has a cache, so the tokens of all ranks are added.
    `reserve` is the memory that neither weights nor KV may use.
    """
    usable, parts = reserve.usable(gpu, layout.gpus), list(stages(model, layout))
    reserved = model.reserved_tokens(demand.context, layout.tp, in_flight_tokens(gpu, layout.pp))
    reserved_share = reserved / demand.context
    tightest = min(parts, key=lambda stage: _stage_tokens(stage, usable, reserved_share))
    rank_tokens = _stage_tokens(tightest, usable, reserved_share)
    served = rank_tokens // demand.context * layout.dp
    tokens = rank_tokens * layout.dp
    if max(stage.weights_bytes for stage in parts) > gpu.hbm_bytes:
        verdict, tokens, served = MemoryVerdict.DOES_NOT_LOAD, 0, 0
    else:
        verdict = MemoryVerdict.SERVES if served else MemoryVerdict.SERVES_NONE
    spare = tokens / (demand.concurrency * demand.context) - 1
    return MemoryCheck(
        *(verdict, demand, tightest.weights_bytes, usable, usable - tightest.weights_bytes),
        *(tightest.kv_token_bytes, tokens, served, spare),
    )


def _stage_tokens(stage: Stage, usable: float, reserved_share: float) -> int:
    return max(0, int((usable - stage.weights_bytes) / (reserved_share * stage.kv_token_bytes)))


def free_kv_bytes(model: Llm, gpu: Gpu, tp: int, reserve: Reserve = ENGINE_RESERVE) -> float:
    """Return the bytes left for KV on one rank of a TP group; negative: the weights do not fit."""
    return check_memory(model, gpu, Layout(tp), Demand(1), reserve).free_bytes


def kv_capacity_tokens(model: Llm, gpu: Gpu, tp: int, reserve: Reserve = ENGINE_RESERVE) -> int:
    """Return how many tokens of KV a TP group can store; 0: the weights do not fit."""
    return check_memory(model, gpu, Layout(tp), Demand(1), reserve).tokens


def min_gpus(model: Llm, gpu: Gpu) -> int:
    """Return the smallest number of GPUs whose raw memory holds the weights.

    A layout may need more.
    """
    return -int(-model.weights_bytes // gpu.hbm_bytes)
