"""Reads from a model's config.json what kinds of layers the model has, and how many of each.

Attention is full, limited to a window, or absent. The other part is a dense MLP or a mixture of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from policies.sizing.hf_config_fields import ConfigError, ConfigMembers
from policies.sizing.hf_experts import expert_layers
from policies.sizing.hf_state_layers import StateLayer, kimi_attention_places, state_layer

# Families whose layers have attention and a state beside it.
_PARALLEL_STATE = frozenset({"falcon_h1"})


class LayerKinds(msgspec.Struct, frozen=True):
    """The number of a model's layers of each kind, and the size of its state-space layers.

    layers            number of all layers
    attention_layers  number of layers with attention
    cached_layers     number of layers with a KV cache of their own: others with attention read the
                      cache of an earlier layer
    window_layers     number of cached layers that keep only a window
    shared_windows    number of layers with a window that read the cache of an earlier layer
    window            number of most recent tokens that these layers read
    mlps              number of layers with an MLP or a mixture of experts
    moe_layers        number of layers with a mixture of experts
    states            number of layers with a state
    state_params      parameters of all state-space layers
    state_bytes       bytes of the state of these layers per sequence
    state_group_params  parameters of these layers that each rank of a TP group has
    state_copies      blocks of KV that a state takes per request
    """

    layers: int
    attention_layers: int
    cached_layers: int
    window_layers: int
    shared_windows: int
    window: int
    mlps: int
    moe_layers: int
    states: int
    state_params: float
    state_bytes: float
    state_group_params: float
    state_copies: int


def layer_kinds(config: ConfigMembers) -> LayerKinds:
    """Return the number of a model's layers of each kind.

    Raises ConfigError if the pattern of layers has a wrong length or an unknown kind.
    """
    layers = config.count("num_hidden_layers")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _lettered(config, pattern, layers)
    attention = _attention_places(config, layers)
    cached = _cached_places(config, attention, layers)
    windows = _window_places(config, attention)
    own_windows = sum(place in cached for place in windows)
    state, states = state_layer(config), layers - len(attention)
    if states and not state.state_bytes:
        raise ConfigError(
            f"config.json: {states} layers have no attention, and the kind of their state is "
            "unknown; known kinds are Mamba 1 and 2 (mamba_d_state, ssm_state_size), Gated "
            "DeltaNet (linear_num_value_heads), Kimi Delta Attention (linear_attn_config), "
            "lightning attention (attn_type_list) and short convolutions (conv_L_cache)"
        )
    if not cached:
        raise ConfigError("config.json: no layer has a KV cache; such models cannot be sized")
    if config.family in _PARALLEL_STATE:
        states = layers
    return LayerKinds(
        *(layers, len(attention), len(cached), own_windows, len(windows) - own_windows),
        config.optional("sliding_window", 0),
        *(layers, expert_layers(config, layers), states),
        *(state.params * states, state.state_bytes * states, state.group_params * states),
        state.copies,
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
    state: StateLayer = state_layer(config)
    states, experts, attention = (pattern.count(letter) for letter in "ME*")
    return LayerKinds(
        *(layers, attention, attention, 0, 0, 0, pattern.count("-") + experts, experts),
        *(states, state.params * states, state.state_bytes * states, state.group_params * states),
        state.copies,
    )


def _attention_places(config: ConfigMembers, layers: int) -> list[int]:
    # Return the indices of the layers with attention: all layers that config.json does not name as
    # layers with a state.
    for name in ("layer_types", "layers_block_type"):
        types = config.get(name)
        if isinstance(types, list):
            _check_length(name, types, layers)
            return [place for place, kind in enumerate(types) if _is_attention(str(kind))]
    flags = config.get("attn_type_list")
    if isinstance(flags, list):
        _check_length("attn_type_list", flags, layers)
        return [place for place, flag in enumerate(flags) if flag]
    if (places := kimi_attention_places(config, layers)) is not None:
        return places
    for name in ("attn_layer_indices", "full_attn_idxs"):
        named = config.get(name)
        if isinstance(named, list):
            return [place for place in named if isinstance(place, int) and 0 <= place < layers]
    if config.has("full_attention_interval"):
        interval = config.count("full_attention_interval")
        return [place for place in range(layers) if (place + 1) % interval == 0]
    if config.has("attn_layer_period"):
        period, offset = config.count("attn_layer_period"), config.optional("attn_layer_offset", 0)
        return [place for place in range(layers) if place % period == offset]
    return list(range(layers))


def _check_length(name: str, entries: Sequence[Any], layers: int) -> None:
    if len(entries) != layers:
        raise ConfigError(
            f"config.json: {name} must have one entry for each of {layers} layers, "
            f"but has {len(entries)}"
        )


def _is_attention(kind: str) -> bool:
    return ("attention" in kind and "linear" not in kind) or kind == "hybrid"


def _cached_places(config: ConfigMembers, attention: Sequence[int], layers: int) -> Sequence[int]:
    # The last `num_kv_shared_layers` layers read the caches of earlier ones (Gemma 3n and 4).
    first_shared = layers - config.optional("num_kv_shared_layers", 0)
    return [place for place in attention if place < first_shared]


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
