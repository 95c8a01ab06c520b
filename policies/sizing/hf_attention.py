"""Counts the parameters of a model's attention layers, and the scalars that they cache.

Attention is MHA, GQA or MLA. Window layers may have other numbers of heads than full layers.
"""

from __future__ import annotations

import msgspec

from policies.sizing.hf_config_fields import ConfigError, ConfigMembers
from policies.sizing.hf_layer_kinds import LayerKinds

_QKV_BIAS = frozenset(
    {*("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text")}
)
_QK_NORM = frozenset(
    {
        *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text"),
        *("qwen3_5_text", "qwen3_5_moe_text", "gemma3", "gemma3_text", "gemma3n_text"),
        "gemma4_text",
    }
)
# Families in which a second half of the query projection gates the output.
_GATED_OUTPUT = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_INDEX_SCALE_BYTES = 4
_INDEXER_PERIOD = (("index_topk_freq", 1), ("index_skip_topk_offset", 2))


class AttentionShape(msgspec.Struct, frozen=True):
    """The sizes of a model's attention layers. Numbers of parameters are sums over all layers.

    params             parameters that the ranks of a TP group divide
    kv_params          the part of `params` that is key and value projections
    replicated_params  parameters that each rank has
    head_dim           scalars per head
    kv_scalars         scalars cached per token in a layer without a window
    window_kv_scalars  scalars cached per token in a layer with a window
    shardable_kv       maximum number of ranks that can divide the KV cache
    extra_kv_bytes     bytes cached per token and layer in addition, whatever the type of the cache
    window_shardable_kv  maximum number of ranks that can divide the cache of a layer with a window;
                         0: equal to shardable_kv
    """

    params: float
    kv_params: float
    replicated_params: float
    head_dim: int
    kv_scalars: int
    window_kv_scalars: int
    shardable_kv: int
    extra_kv_bytes: float = 0.0
    window_shardable_kv: int = 0


class _Heads(msgspec.Struct, frozen=True):
    # The heads of one kind of layer; `values` are the scalars of a value.
    heads: int
    kv_heads: int
    dim: int
    values: int

    @property
    def kv_scalars(self) -> int:
        return self.kv_heads * (self.dim + self.values)


def attention_shape(config: ConfigMembers, kinds: LayerKinds) -> AttentionShape:
    """Read the sizes of a model's attention layers. Raises ConfigError if fields contradict."""
    if config.has("kv_lora_rank"):
        return _mla(config, kinds)
    full, narrow = _heads(config, is_window=False), _heads(config, is_window=True)
    windows = kinds.window_layers + kinds.shared_windows
    own = kv = norms = 0.0
    cached = kinds.cached_layers - kinds.window_layers
    counts = (
        (full, kinds.attention_layers - windows, cached),
        (narrow, windows, kinds.window_layers),
    )
    for heads, layers, with_cache in counts:
        projections = with_cache * _kv_params(config, heads)
        own += layers * _query_params(config, heads) + projections
        kv += projections
        norms += layers * (2 * heads.dim if config.family in _QK_NORM else 0)
    main = full if kinds.attention_layers > windows else narrow
    return AttentionShape(
        *(own, kv, norms, main.dim, main.kv_scalars, narrow.kv_scalars, main.kv_heads),
        window_shardable_kv=narrow.kv_heads if narrow.kv_heads != main.kv_heads else 0,
    )


def _heads(config: ConfigMembers, *, is_window: bool) -> _Heads:
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    dim = config.first("head_dim", "attention_head_dim", "kv_channels") or width // heads
    kv_heads = _kv_heads(config, heads)
    if is_window:
        heads = config.optional("swa_num_attention_heads", heads)
        kv_heads = config.optional("swa_num_key_value_heads", kv_heads)
        dim = config.optional("swa_head_dim", dim)
        values = config.optional("swa_v_head_dim", config.optional("v_head_dim", dim))
    else:
        dim = config.optional("global_head_dim", _own_head_dim(config) or dim)
        values = config.optional("v_head_dim", dim)
        if config.flag("attention_k_eq_v"):
            # Values are the keys, but vLLM has a projection and a cache for both.
            kv_heads = config.optional("num_global_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads ({kv_heads}) must divide the "
            f"number of attention heads ({heads})"
        )
    return _Heads(heads, kv_heads, dim, values)


def _own_head_dim(config: ConfigMembers) -> int | None:
    # Return the head_dim that `per_layer_config` gives single layers: those without a window.
    layers = config.get("per_layer_config")
    if not isinstance(layers, dict):
        return None
    owns = [ConfigMembers(layer) for layer in layers.values() if isinstance(layer, dict)]
    return next((own.count("head_dim") for own in owns if own.has("head_dim")), None)


def _kv_heads(config: ConfigMembers, heads: int) -> int:
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    return config.first(*_KV_HEAD_NAMES) or heads


def _kv_params(config: ConfigMembers, heads: _Heads) -> float:
    biases = config.family in _QKV_BIAS or config.flag("attention_bias")
    return heads.kv_scalars * (config.count("hidden_size") + biases)


def _query_params(config: ConfigMembers, heads: _Heads) -> float:
    # Return the parameters of the query and output projections, and of what belongs to heads.
    width, is_biased = config.count("hidden_size"), config.flag("attention_bias")
    biases = config.family in _QKV_BIAS or is_biased
    own = heads.heads * (heads.dim * (width + biases) + heads.values * width)
    own += width if is_biased else 0
    own += heads.heads if config.family == "gpt_oss" else 0  # attention sinks
    gated = config.flag("attn_output_gate", config.family in _GATED_OUTPUT)
    return own + (heads.heads * heads.dim * width if gated else 0)


def _mla(config: ConfigMembers, kinds: LayerKinds) -> AttentionShape:
    config.require("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    query = config.optional("q_lora_rank", 0)
    own = heads * latent * (nope + value) + heads * value * width
    own += heads * (nope + rope) * (query or width)
    down = width * (latent + rope + query) + latent + query
    layers, scalars = kinds.attention_layers, latent + rope
    replicated, extra = layers * down, 0.0
    if config.has("index_topk"):
        # The indexer of sparse attention has weights and a cache of its own, on every rank.
        index, dim = config.count("index_n_heads"), config.count("index_head_dim")
        indexers = _indexers(config, layers)
        replicated += indexers * ((query or width) * index * dim + width * (dim + index) + 2 * dim)
        extra = (dim + _INDEX_SCALE_BYTES) * indexers / layers
    return AttentionShape(
        *(layers * own, 0, replicated, nope + rope, scalars, scalars, 1), extra_kv_bytes=extra
    )


def _indexers(config: ConfigMembers, layers: int) -> int:
    # Return how many layers have an indexer; others use the choice of an earlier layer.
    for name in ("indexer_types", "index_topk_pattern"):
        kinds = config.get(name)
        if isinstance(kinds, list | str) and len(kinds) == layers:
            return sum(str(kind).lower() not in ("s", "shared") for kind in kinds)
    period, offset = (config.optional(*pair) for pair in _INDEXER_PERIOD)
    return sum(max(0, layer - offset + 1) % period == 0 for layer in range(layers))
