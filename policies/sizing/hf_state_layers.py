"""Counts the layers of a model that keep a state of constant size instead of a KV cache.

Known are Mamba 1 and 2, Gated DeltaNet, Kimi Delta Attention, lightning attention and short
convolutions. Source: the classes of these layers in vLLM (model_executor/layers and
model_executor/models).
"""

from __future__ import annotations

from typing import Any

import msgspec

from policies.sizing.hf_config_fields import ConfigMembers
from policies.sizing.model_shapes import STATE_COPIES

_MODEL_BYTES, _WIDE_BYTES = 2, 4
# Mamba 2 also keeps the state at a block boundary within a prefill (MambaMixer2 in vLLM).
_MAMBA_2_COPIES = STATE_COPIES + 1


class StateLayer(msgspec.Struct, frozen=True):
    """One layer that keeps a state.

    params        its parameters
    state_bytes   bytes of its state per sequence
    group_params  the part of `params` in the only group of Mamba 2; ranks cannot divide a group, so
                  each rank has these parameters
    copies        blocks of KV that its state takes per request
    """

    params: float = 0.0
    state_bytes: float = 0.0
    group_params: float = 0.0
    copies: int = STATE_COPIES


def state_layer(config: ConfigMembers) -> StateLayer:
    """Read the size of a layer that keeps a state instead of a KV cache from config.json.

    If the kind of the state layers is unknown, the result is a layer without a state.
    """
    width = config.count("hidden_size")
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict):
        return _kimi_delta(ConfigMembers(linear), width)
    if config.has("linear_num_value_heads"):
        return _delta_net(config, width)
    if config.has("attn_type_list"):
        return _lightning(config, width)
    if config.has("conv_L_cache"):
        return _short_convolution(config, width)
    if config.has("mamba_d_state"):
        return _mamba(config, width)
    if config.has("ssm_state_size"):
        heads = config.count("mamba_num_heads")
        inner, groups = heads * config.count("mamba_head_dim"), config.optional("n_groups", 1)
        return _mamba_2(config, width, inner, heads, groups)
    return StateLayer()


def _ssm_bytes(config: ConfigMembers) -> int:
    # Return the bytes of a scalar of the recurrent state. vLLM reads the same members.
    default = "float32" if config.family == "nemotron_h" else "bfloat16"
    text = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or default
    return _WIDE_BYTES if text == "float32" else _MODEL_BYTES


def _mamba(config: ConfigMembers, width: int) -> StateLayer:
    inner = config.optional("mamba_d_ssm", width * config.optional("mamba_expand", 2))
    if config.has("mamba_n_heads"):
        heads, groups = config.count("mamba_n_heads"), config.optional("mamba_n_groups", 1)
        return _mamba_2(config, width, inner, heads, groups)
    size, kernel = config.count("mamba_d_state"), config.optional("mamba_d_conv", 4)
    rank = config.optional("mamba_dt_rank", -(-width // 16))
    params = width * 2 * inner + inner * (kernel + 1 + rank + 2 * size + rank + size + 2)
    params += rank + 2 * size if config.family == "jamba" else 0  # norms of its projections
    state = inner * (size * _ssm_bytes(config) + (kernel - 1) * _MODEL_BYTES)
    return StateLayer(params + inner * width, state)


def _mamba_2(config: ConfigMembers, width: int, inner: int, heads: int, groups: int) -> StateLayer:
    size = config.optional("ssm_state_size", config.optional("mamba_d_state", 128))
    kernel = config.optional("conv_kernel", config.optional("mamba_d_conv", 4))
    channels = inner + 2 * groups * size
    params = width * (inner + channels + heads) + channels * (kernel + 1) + 3 * heads + inner
    state = inner * size * _ssm_bytes(config)
    state += channels * (kernel - 1) * _MODEL_BYTES
    of_group = 2 * size * (width + kernel + 1) if groups == 1 else 0
    return StateLayer(params + inner * width, state, of_group, _MAMBA_2_COPIES)


def _delta_net(config: ConfigMembers, width: int) -> StateLayer:
    # As Qwen3NextGatedDeltaNet in vLLM (models/qwen3_next.py): one projection to queries, keys,
    # values and output gates, another to two gates per value head.
    heads, dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    key_dim = config.count("linear_key_head_dim")
    keys, values = config.count("linear_num_key_heads") * key_dim, heads * dim
    channels, kernel = 2 * keys + values, config.optional("linear_conv_kernel_dim", 4)
    params = width * (channels + values + 2 * heads) + channels * kernel + 2 * heads + dim
    state = values * key_dim * _ssm_bytes(config)
    state += channels * (kernel - 1) * _MODEL_BYTES
    return StateLayer(params + values * width, state)


def _kimi_delta(config: ConfigMembers, width: int) -> StateLayer:
    # As KimiDeltaAttention in vLLM: three projections with convolutions, two gates of low rank.
    heads, dim = config.count("num_heads"), config.count("head_dim")
    inner, kernel = heads * dim, config.optional("short_conv_kernel_size", 4)
    gates = 2 * (width * dim + dim * inner) + inner + heads + width * heads
    params = 4 * width * inner + 3 * inner * kernel + gates + dim
    return StateLayer(params, inner * dim * _WIDE_BYTES + 3 * inner * (kernel - 1) * _MODEL_BYTES)


def _lightning(config: ConfigMembers, width: int) -> StateLayer:
    # As MiniMaxText01LinearAttention in vLLM: queries, keys, values, a gate of the output.
    heads = config.count("num_attention_heads")
    dim = config.optional("head_dim", width // heads)
    inner = heads * dim
    return StateLayer(5 * width * inner + inner, inner * dim * _WIDE_BYTES)


def _short_convolution(config: ConfigMembers, width: int) -> StateLayer:
    # As ShortConv in vLLM: projections around a gated convolution.
    inner, kernel = config.optional("conv_dim", width), config.count("conv_L_cache")
    params = width * 3 * inner + inner * kernel + inner * width
    return StateLayer(params, inner * (kernel - 1) * _MODEL_BYTES)


def kimi_attention_places(config: ConfigMembers, layers: int) -> list[int] | None:
    """Return the indices of a model's layers with full attention, if its config.json names them.

    They are in `linear_attn_config`, as in Kimi Linear. The other layers keep a state instead of a
    KV cache.
    """
    linear: Any = config.get("linear_attn_config")
    places = linear.get("full_attn_layers") if isinstance(linear, dict) else None
    if not isinstance(places, list):
        return None
    return [place - 1 for place in places if isinstance(place, int) and 1 <= place <= layers]
