"""Reads from a model's config.json what kinds of layers the model has, and how many of each.

Attention is full, limited to a window, or absent. The other part is a dense MLP or a mixture of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.sizing.hf_members import ConfigError, ConfigMembers

STATE_BYTES = 2  # vLLM keeps states of state-space layers in the model's type


class LayerKinds(msgspec.Struct, frozen=True):
    """The number of a model's layers of each kind, and the size of its state-space layers.

    layers            number of all layers
    attention_layers  number of layers with a KV cache
    window_layers     number of layers with window attention
    window            number of most recent tokens that these layers read
    mlps              number of layers with an MLP or a mixture of experts
    moe_layers        number of layers with a mixture of experts
    state_params      parameters of all state-space layers
    state_bytes       bytes of the state of these layers per sequence
    """

    layers: int
    attention_layers: int
    window_layers: int
    window: int
    mlps: int
    moe_layers: int
    state_params: float
    state_bytes: float


def layer_kinds(config: ConfigMembers) -> LayerKinds:
    """Return the number of a model's layers of each kind.

    Raises ConfigError if the pattern of layers has a wrong length or an unknown kind.
    """
    layers = config.count("num_hidden_layers")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _lettered(config, pattern, layers)
    attention = _attention_places(config, layers)
    windows = _window_places(config, attention)
    moe = _moe_layers(config, layers)
    params, state = _state_space(config)
    states = layers - len(attention)
    if states and not state:
        raise ConfigError(
            f"config.json: {states} layers have no attention, and the kind of their state is "
            "unknown; known kinds are Mamba 1 and 2 (mamba_d_state, ssm_state_size) and Gated "
            "DeltaNet (linear_num_value_heads)"
        )
    return LayerKinds(
        *(layers, len(attention), len(windows), config.optional("sliding_window", 0)),
        *(layers, moe, params * states, state * states),
    )


def _lettered(config: ConfigMembers, pattern: str, layers: int) -> LayerKinds:
    # Return the layer kinds of Nemotron-H's pattern, one letter per layer.
    #
    # M is a state-space layer, * attention, - an MLP, E experts. Raises ConfigError for a wrong
    # length.
    if len(pattern) != layers:
        raise ConfigError(
            "config.json: hybrid_override_pattern must have one letter for each "
            f"of {layers} layers, but has {len(pattern)}"
        )
    params, state = _state_space(config)
    states, experts = pattern.count("M"), pattern.count("E")
    return LayerKinds(
        *(layers, pattern.count("*"), 0, 0, pattern.count("-") + experts, experts),
        *(params * states, state * states),
    )


def _attention_places(config: ConfigMembers, layers: int) -> list[int]:
    # Return the indices of the layers with attention: all layers that config.json does not name as
    # state-space layers.
    types = config.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ConfigError(
                "config.json: layer_types must have one entry for each of "
                f"{layers} layers, but has {len(types)}"
            )
        return [
            place
            for place, kind in enumerate(types)
            if "attention" in str(kind) and "linear" not in str(kind)
        ]
    named = config.get("attn_layer_indices")
    if isinstance(named, list):
        return [place for place in named if isinstance(place, int) and 0 <= place < layers]
    if config.has("full_attention_interval"):
        interval = config.count("full_attention_interval")
        return [place for place in range(layers) if (place + 1) % interval == 0]
    if config.has("attn_layer_period"):
        period, offset = config.count("attn_layer_period"), config.optional("attn_layer_offset", 0)
        return [place for place in range(layers) if place % period == offset]
    return list(range(layers))


def _window_places(config: ConfigMembers, attention: Sequence[int]) -> list[int]:
    if not config.optional("sliding_window", 0) or not config.flag("use_sliding_window", True):
        return []
    types = config.get("layer_types")
    if isinstance(types, list):
        return [place for place in attention if str(types[place]).startswith("sliding")]
    period = config.optional("sliding_window_pattern", 2 if config.family == "gemma2" else 0)
    if period:
        return [place for place in attention if (place + 1) % period]
    first = config.optional("max_window_layers", 0)
    return [place for place in attention if place >= first]


def _moe_layers(config: ConfigMembers, layers: int) -> int:
    if not config.experts:
        return 0
    if config.has("expert_layer_period"):
        period = config.count("expert_layer_period")
        offset = config.optional("expert_layer_offset", 0)
        return sum(place % period == offset for place in range(layers))
    step = config.optional("decoder_sparse_step", config.optional("interleave_moe_layer_step", 1))
    dense = config.get("mlp_only_layers") or []
    first = config.optional("first_k_dense_replace", 0)
    return sum(
        place >= first and (place + 1) % step == 0 and place not in dense for place in range(layers)
    )


def _state_space(config: ConfigMembers) -> tuple[float, float]:
    # Return the parameters of one state-space layer (Mamba 1 or 2, Gated DeltaNet), and its state
    # per sequence.
    width = config.count("hidden_size")
    if config.has("linear_num_value_heads"):
        return _delta_net(config, width)
    if config.has("mamba_d_state"):
        size, kernel = config.count("mamba_d_state"), config.optional("mamba_d_conv", 4)
        inner = width * config.optional("mamba_expand", 2)
        heads = config.optional("mamba_n_heads", 0)
        groups = config.optional("mamba_n_groups", 1)
    elif config.has("ssm_state_size"):
        size, kernel = config.count("ssm_state_size"), config.optional("conv_kernel", 4)
        heads = config.count("mamba_num_heads")
        inner = heads * config.count("mamba_head_dim")
        groups = config.optional("n_groups", 1)
    else:
        return 0.0, 0.0
    if not heads:
        return _mamba_1(config, width, inner, size, kernel)
    channels = inner + 2 * groups * size
    params = width * (inner + channels + heads) + channels * (kernel + 1) + 3 * heads + inner
    return params + inner * width, STATE_BYTES * (inner * size + channels * (kernel - 1))


def _mamba_1(
    config: ConfigMembers, width: int, inner: int, size: int, kernel: int
) -> tuple[float, float]:
    rank = config.optional("mamba_dt_rank", -(-width // 16))
    params = width * 2 * inner + inner * (kernel + 1 + rank + 2 * size + rank + size + 2)
    params += rank + 2 * size if config.family == "jamba" else 0  # norms of its projections
    return params + inner * width, STATE_BYTES * inner * (size + kernel - 1)


def _delta_net(config: ConfigMembers, width: int) -> tuple[float, float]:
    # The layer has one projection to queries, keys, values and output gates, and another to two
    # gates per value head, like Qwen3NextGatedDeltaNet in vLLM (models/qwen3_next.py).
    heads, dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    key_dim = config.count("linear_key_head_dim")
    keys, values = config.count("linear_num_key_heads") * key_dim, heads * dim
    channels, kernel = 2 * keys + values, config.optional("linear_conv_kernel_dim", 4)
    params = width * (channels + values + 2 * heads) + channels * kernel + 2 * heads + dim
    return params + values * width, STATE_BYTES * (values * key_dim + channels * (kernel - 1))
