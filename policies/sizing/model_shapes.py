"""The shapes and sizes of models: parameters, bytes of weights, KV per token and per request.

The built-in shapes are the models' published configurations with their published totals.
hf_parameter_count.py counts the shape of a local config.json. gpu_memory.py checks what fits into
GPU memory. mockgpu/timing/roofline.py computes times.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

MAX_GROUP_PADDING = 1.5
"""vLLM pads the smaller kind of a model's layers to the number of the larger kind, up to this
factor.

Beyond it, vLLM divides the larger kind into groups.
"""

BLOCK_TOKENS = 16  # tokens of a KV block, and the unit by which a block grows
MLA_BLOCK_TOKENS = 128  # that unit where a latent is cached beside states
IN_FLIGHT_TOKENS = 16_384  # two steps of 8,192 tokens: one runs while the next one is prepared
STATE_COPIES = 2  # the state in use, and the one at the last block boundary for the prefix cache


class Llm(msgspec.Struct, frozen=True):
    """The shape of a decoder-only model. Numbers of parameters are sums over all layers.

    layers             number of layers
    width              length of a token's hidden state
    heads              number of attention heads
    head_dim           scalars per head
    kv_scalars         scalars cached per token and layer: 2 x kv_heads x head_dim, or MLA's latent
    shardable_kv       maximum number of ranks that can split the KV cache: kv_heads for GQA; 1 for
                       MLA, where each rank has all of it
    params             all parameters
    active_params      parameters that one token uses
    weight_bytes       bytes per parameter
    kv_bytes           bytes per cached scalar
    embedding_params   parameters of the input embedding, and as many of the output head unless
                       `is_tied`
    window_kv_scalars  scalars cached per token in a layer with a window; 0: equal to kv_scalars
    window_shardable_kv  maximum number of ranks that can split the cache of a layer with a window;
                       0: equal to shardable_kv
    extra_kv_bytes     bytes cached per token and layer in addition to the scalars, whatever their
                       type
    max_context        maximum tokens of prompt plus answer
    grid_name          name of the model in tables of measured step times; empty: it is in none
    experts            number of routed experts per layer; 0: the model is dense
    experts_per_token  number of experts that one token uses
    expert_params      parameters of all routed experts, which are in the last `moe_layers` layers
    kv_proj_params     parameters of the key and value projections, replicated where TP exceeds the
                       KV heads
    replicated_params  parameters that each rank of a TP group has: norms, routers, MLA's down
                       projections
    state_group_params  parameters of the only group of Mamba 2, which each rank has
    bf16_params        parameters that keep two bytes each when the other weights are quantised
    window_layers      layers that attend to, and keep, only the last `window` tokens
    state_layers       layers without a KV cache of their own
    states             layers with a state of constant size, which have `state_bytes` per sequence
                       in total
    state_copies       blocks of KV that a state takes per request
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
    embedding_params: float = 0.0
    is_tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_params: float = 0.0
    moe_layers: int = 0
    kv_proj_params: float = 0.0
    replicated_params: float = 0.0
    state_group_params: float = 0.0
    bf16_params: float = 0.0
    window_layers: int = 0
    window: int = 0
    window_kv_scalars: int = 0
    window_shardable_kv: int = 0
    extra_kv_bytes: float = 0.0
    state_layers: int = 0
    states: int = 0
    state_bytes: float = 0.0
    state_copies: int = STATE_COPIES

    @property
    def weights_bytes(self) -> float:
        return self.params * self.param_bytes

    @property
    def param_bytes(self) -> float:
        """Return the mean bytes per parameter, over quantised and unquantised weights."""
        kept = self.bf16_params * max(0.0, 2.0 - self.weight_bytes)
        return self.weight_bytes + kept / self.params

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of one token's hidden state.

        It is all-reduced within a TP group, and passed between pipeline stages.
        """
        return 2 * self.width

    @property
    def allreduces(self) -> int:
        """Return the number of all-reduces per step: after attention and after the MLP of each
        layer.
        """
        return 2 * self.layers

    @property
    def kv_layers(self) -> int:
        return self.layers - self.state_layers

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of KV cache per token, over all layers and KV heads."""
        full = self.kv_layers - self.window_layers
        scalars = (full + self.window_layers * self.window_share()) * self.kv_scalars
        return int(scalars * self.kv_bytes + self.kv_layers * self.extra_kv_bytes)

    def window_share(self, tp: int = 1) -> float:
        """Return the KV per token of a window layer divided by that of a full layer.

        Both are counted as cached scalars on one of `tp` ranks.
        """
        share = (self.window_kv_scalars or self.kv_scalars) / self.kv_scalars
        in_window = _share_of_heads(self.window_shardable_kv or self.shardable_kv, tp)
        return share * in_window / _share_of_heads(self.shardable_kv, tp)

    @property
    def mla(self) -> bool:
        """Return whether attention caches one latent vector per token (MLA), not keys and
        values.
        """
        return self.shardable_kv == 1 and self.kv_scalars != 2 * self.head_dim

    def kv_share(self, tp: int) -> float:
        """Return the share of each layer's KV cache that one of `tp` ranks keeps.

        Ranks keep whole heads, and at least one.
        """
        share = _share_of_heads(self.shardable_kv, tp)
        if not self.window_shardable_kv:
            return share
        full = self.kv_layers - self.window_layers
        on_rank = full + self.window_layers * self.window_share(tp)
        return share * on_rank / (full + self.window_layers * self.window_share())

    def kv_rank_bytes(self, tp: int) -> float:
        """Return the bytes of KV per token on one rank of a TP group of `tp` ranks.

        If there are more ranks than KV heads, heads are replicated.
        """
        return self.kv_token_bytes * self.kv_share(tp)

    def read_tokens(self, context: int) -> float:
        """Return how many tokens of KV a request of `context` tokens reads per step, as a mean
        over the layers with a KV cache.
        """
        if not self.kv_layers:
            return 0.0
        full, share = self.kv_layers - self.window_layers, self.window_share()
        read = full * context + self.window_layers * share * min(context, self.window)
        return read / (full + self.window_layers * share)

    def cached_tokens(
        self,
        context: int,
        in_flight: int = IN_FLIGHT_TOKENS,
        block_tokens: int = BLOCK_TOKENS,
        tp: int = 1,
    ) -> float:
        """Return how many tokens of KV a request of `context` tokens reserves, as a mean over the
        layers with a KV cache.

        A layer with window attention keeps its window and the tokens of all steps in flight, in
        whole blocks plus one. Such layers share block tables, in groups of as many layers as have
        full attention; the last group is padded. Source: vLLM 0.32, SlidingWindowSpec and
        `get_kv_cache_groups` (v1/core/kv_cache_utils.py).
        """
        if not self.kv_layers:
            return 0.0
        full = self.kv_layers - self.window_layers
        blocks = -(-min(context, self.window - 1 + in_flight) // block_tokens) + 1
        in_window = min(context, blocks * block_tokens)
        share = self.window_share(tp)
        layers = [(full, context, 1.0), (self.window_layers, in_window, share)]
        group = _group_size(full or self.window_layers, self.window_layers or full)
        kept = sum(-(-count // group) * group * tokens * weight for count, tokens, weight in layers)
        return kept / (full + self.window_layers * share)

    def reserved_tokens(
        self,
        context: int,
        tp: int,
        in_flight: int = IN_FLIGHT_TOKENS,
        block_tokens: int = BLOCK_TOKENS,
    ) -> float:
        """Return how many tokens of KV a request of `context` tokens reserves with its states, as
        a mean over the layers with a KV cache.

        A state takes `state_copies` blocks of KV. Blocks are as large as a state, so that all
        layers share one pool. Source: vLLM 0.32, MambaSpec and `_align_hybrid_block_size`
        (platforms/interface.py).
        """
        if not self.states or not self.kv_layers:
            return self.cached_tokens(context, in_flight, block_tokens, tp)
        kv_bytes = self.kv_rank_bytes(tp) / self.kv_layers
        state_bytes = self.state_bytes / self.states / tp
        unit = max(block_tokens, MLA_BLOCK_TOKENS) if self.mla else block_tokens
        block = -int(-state_bytes // (kv_bytes * unit)) * unit
        group = _group_size(self.kv_layers, self.states)
        in_attention = -(-self.kv_layers // group) * group * -(-context // block) * block
        in_states = -(-self.states // group) * group * self.state_copies * block
        return (in_attention + in_states) / self.kv_layers


def _share_of_heads(heads: int, tp: int) -> float:
    # Return the share of `heads` KV heads on one of `tp` ranks.
    return -(-heads // tp) / heads


def _group_size(one: int, other: int) -> int:
    # Return how many layers share a block table, for the numbers of layers of two kinds.
    least, most = sorted((one, other))
    return most if most < MAX_GROUP_PADDING * least else least


def gqa(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    params: float,
    grid_name: str = "",
    vocabulary: int = 0,
) -> Llm:
    """Build the shape of a model with dense bf16 weights, grouped-query attention and heads of 128.

    The parameters are the fields of Llm, and:

    kv_heads    number of KV heads
    vocabulary  number of tokens in the vocabulary, to count the embeddings separately; 0: do not
    """
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
        embedding_params=vocabulary * width,
    )


def fp8(model: Llm, name: str, grid_name: str = "") -> Llm:
    """Return a copy of the shape with fp8 weights, one byte each.

    The KV cache stays bf16, as in vLLM's default.
    """
    return msgspec.structs.replace(model, name=name, weight_bytes=1.0, grid_name=grid_name)


_LLAMA_3_VOCABULARY = 128_256
_LLAMA_8B = gqa(
    *("meta-llama/Llama-3.1-8B-Instruct", 32, 4096, 32, 8, 8.03e9),
    *("Meta-Llama-3.1-8B", _LLAMA_3_VOCABULARY),
)
_LLAMA_70B = gqa(
    *("meta-llama/Llama-3.1-70B-Instruct", 80, 8192, 64, 8, 70.6e9),
    *("Meta-Llama-3.1-70B", _LLAMA_3_VOCABULARY),
)
_LLAMA_405B = gqa(
    *("meta-llama/Llama-3.1-405B-Instruct", 126, 16384, 128, 8, 405.9e9),
    *("Meta-Llama-3.1-405B", _LLAMA_3_VOCABULARY),
)


def _llamas() -> dict[str, Llm]:
    small, large, huge = _LLAMA_8B, _LLAMA_70B, _LLAMA_405B
    llama2 = gqa("meta-llama/Llama-2-13b", 40, 5120, 40, 40, 13.0e9, vocabulary=32_000)
    large_fp8 = fp8(large, "meta-llama/Llama-3.1-70B-Instruct-FP8", "Llama-3.1-70B-Instruct-FP8")
    return {
        "demo-8b": small,
        "llama-3.1-8b": small,
        "llama-3.1-8b-fp8": fp8(small, "meta-llama/Llama-3.1-8B-Instruct-FP8"),
        "llama-3.1-70b": large,
        "llama-3.1-70b-fp8": large_fp8,
        "llama-3.1-405b": huge,
        "llama-3.1-405b-fp8": fp8(huge, "meta-llama/Llama-3.1-405B-Instruct-FP8"),
        "llama-2-13b": msgspec.structs.replace(llama2, max_context=4_096),
    }


def _deepseek_v3() -> Llm:
    # Return the shape of DeepSeek-V3: 671B parameters, 653.9B of them in 58 layers of 256 experts.
    return Llm(
        *("deepseek-ai/DeepSeek-V3", 61, 7168, 128, 192, 576, 1, 671e9, 37e9),
        weight_bytes=1.0,
        max_context=163_840,
        embedding_params=129_280 * 7168,
        experts=256,
        experts_per_token=8,
        expert_params=58 * 256 * 3 * 7168 * 2048,
        moe_layers=58,
    )


def _table() -> dict[str, Llm]:
    qwen = gqa("Qwen/Qwen3-32B", 64, 5120, 64, 8, 32.8e9, vocabulary=151_936)
    short = _llamas() | {
        "qwen3-32b": msgspec.structs.replace(qwen, max_context=40_960),
        "deepseek-v3": _deepseek_v3(),
    }
    return short | {model.name.lower(): model for model in short.values()}


MODELS: Mapping[str, Llm] = MappingProxyType(_table())


def model_named(name: str) -> Llm:
    """Return the shape of a model by its short or full name; upper and lower case are equal.

    Raises ValueError if the name is unknown.
    """
    model = MODELS.get(name.lower())
    if model is None:
        short = ", ".join(known for known in MODELS if "/" not in known)
        raise ValueError(f"unknown model {name!r}; known models: {short}")
    return model
