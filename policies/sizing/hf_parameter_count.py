"""Reads a model's shape from its Hugging Face config.json, and counts parameters tensor by tensor.

The input is plain data. Supported are decoders with MHA, GQA or MLA; dense MLPs and mixtures of
experts; full, sliding-window and state-space layers. Sources: the modelling code of the
`transformers` library and of vLLM for these families.
"""

from __future__ import annotations

from typing import Any

import msgspec

from policies.sizing.hf_layer_kinds import LayerKinds, layer_kinds
from policies.sizing.hf_members import ConfigError, ConfigMembers
from policies.sizing.model_shapes import Llm

# Families whose MLP has two matrices; all others have a gate as the third.
_UNGATED = frozenset({"gpt2", "gpt_neox", "opt", "falcon", "phi", "starcoder2", "mpt", "nemotron"})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
# Routers with a bias per expert: for balance (DeepSeek-V3), or of the linear layer.
_ROUTER_BIAS = frozenset({"deepseek_v3", "gpt_oss"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gemma3_text"})
# A shared expert whose weight a linear layer of one output gives.
_GATED_SHARED_EXPERT = frozenset({"qwen2_moe", "qwen3_next"})
_SANDWICH_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})


class _Attention(msgspec.Struct, frozen=True):
    params: float
    kv_params: float
    replicated_params: float
    head_dim: int
    kv_scalars: int
    shardable_kv: int


def shape_from_config(config: Any, name: str) -> Llm:
    """Return the shape of the model that a parsed config.json describes.

    A multimodal configuration describes its language model in `text_config`; other parts are not
    counted. Raises ConfigError (a ValueError) if the model is not supported.
    """
    if not isinstance(config, dict):
        raise ConfigError("config.json must contain a JSON object")
    text = config.get("text_config")
    outer = ConfigMembers(config | text if isinstance(text, dict) else config)
    outer.require("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    outer.require_one("intermediate_size", "moe_intermediate_size", "ffn_hidden_size")
    kinds = layer_kinds(outer)
    return _assemble(outer, kinds, name)


def _assemble(config: ConfigMembers, kinds: LayerKinds, name: str) -> Llm:
    width, layers = config.count("hidden_size"), kinds.layers
    attention = _mla(config) if config.has("kv_lora_rank") else _gqa(config)
    experts = _experts(config, kinds)
    embedding = config.count("vocab_size") * width
    ends = embedding if config.is_tied else 2 * embedding
    norms = width * (_norms_per_layer(config) * layers + 1)
    replicated = attention.replicated_params * kinds.attention_layers + norms + experts.routers
    params = ends + replicated + _split_params(config, kinds, attention) + experts.routed
    params += experts.shared
    idle = experts.routed * (1 - experts.per_token / max(1, experts.count))
    weight_bytes, quantised_only = config.weight_bytes()
    kept = params - experts.routed if quantised_only == "experts" else ends + replicated
    shape = Llm(
        *(name, layers, width, config.count("num_attention_heads"), attention.head_dim),
        *(attention.kv_scalars, attention.shardable_kv, params, params - idle, weight_bytes),
        max_context=config.max_context,
        embedding_params=embedding,
        is_tied=config.is_tied,
        kv_proj_params=attention.kv_params * kinds.attention_layers,
        replicated_params=replicated,
        bf16_params=kept if weight_bytes < 2 else 0.0,
    )
    return _with_kinds(shape, kinds, experts)


def _norms_per_layer(config: ConfigMembers) -> int:
    if config.has("hybrid_override_pattern"):
        return 1
    return 4 if config.family in _SANDWICH_NORMS else 2


def _split_params(config: ConfigMembers, kinds: LayerKinds, attention: _Attention) -> float:
    dense_mlps = (kinds.mlps - kinds.moe_layers) * _mlp(config, config.intermediate)
    return attention.params * kinds.attention_layers + kinds.state_params + dense_mlps


def _with_kinds(shape: Llm, kinds: LayerKinds, experts: _Experts) -> Llm:
    return msgspec.structs.replace(
        shape,
        experts=experts.count,
        experts_per_token=experts.per_token,
        expert_params=experts.routed,
        moe_layers=kinds.moe_layers,
        window_layers=kinds.window_layers,
        window=kinds.window,
        state_layers=kinds.layers - kinds.attention_layers,
        state_bytes=kinds.state_bytes,
    )


def _gqa(config: ConfigMembers) -> _Attention:
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.optional("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads ({kv_heads}) must divide the "
            f"number of attention heads ({heads})"
        )
    dim = config.optional("head_dim", width // heads)
    biases = config.family in _QKV_BIAS or config.flag("attention_bias")
    kv = 2 * kv_heads * dim * (width + biases)
    own = heads * dim * (2 * width + biases) + kv
    own += width if config.flag("attention_bias") else 0
    own += heads if config.family == "gpt_oss" else 0  # attention sinks
    own += heads * dim * width if config.family == "qwen3_next" else 0  # gates of the output
    norms = 2 * dim if config.family in _QK_NORM else 0
    return _Attention(own, kv, norms, dim, 2 * kv_heads * dim, kv_heads)


def _mla(config: ConfigMembers) -> _Attention:
    config.require("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    query = config.optional("q_lora_rank", 0)
    own = heads * latent * (nope + value) + heads * value * width
    own += heads * (nope + rope) * (query or width)
    down = width * (latent + rope + query) + latent + query
    return _Attention(own, 0, down, nope + rope, latent + rope, 1)


class _Experts(msgspec.Struct, frozen=True):
    count: int = 0
    per_token: int = 0
    routed: float = 0.0
    shared: float = 0.0
    routers: float = 0.0


def _experts(config: ConfigMembers, kinds: LayerKinds) -> _Experts:
    if not kinds.moe_layers:
        return _Experts()
    count = config.experts
    per_token = config.optional("num_experts_per_tok", config.optional("num_experts_per_token", 1))
    if not 1 <= per_token <= count:
        raise ConfigError(f"config.json: num_experts_per_tok must be 1 to {count}, not {per_token}")
    narrow = config.optional("intermediate_size", config.intermediate)
    size = config.optional("moe_intermediate_size", narrow)
    shared_size = config.optional(
        "shared_expert_intermediate_size", config.optional("n_shared_experts", 0) * size
    )
    layers, width = kinds.moe_layers, config.count("hidden_size")
    if config.family == "llama4_text":
        shared_size = size
    biases = 2 * size + width if config.family == "gpt_oss" else 0
    return _Experts(
        count=count,
        per_token=per_token,
        routed=layers * count * (_mlp(config, size) + biases),
        shared=layers * _mlp(config, shared_size),
        routers=layers * _router(config, count, width),
    )


def _router(config: ConfigMembers, experts: int, width: int) -> float:
    gate = width if config.family in _GATED_SHARED_EXPERT else 0
    return experts * (width + (config.family in _ROUTER_BIAS)) + gate


def _mlp(config: ConfigMembers, size: int) -> float:
    return config.count("hidden_size") * size * (2 if config.family in _UNGATED else 3)
