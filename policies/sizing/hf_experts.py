"""Reads from a model's config.json which layers are mixtures of experts, and how large they are.

Families name the same property differently, so each is looked for by several names.
"""

from __future__ import annotations

from typing import Any

import msgspec

from policies.sizing.hf_config_fields import ConfigError, ConfigMembers

# Routers with a bias per expert: for balance (DeepSeek-V3), or of the linear layer.
_ROUTER_BIAS = frozenset({"deepseek_v3", "gpt_oss", "kimi_k2", "glm4_moe"})
# A shared expert whose weight a linear layer of one output gives.
_GATED_SHARED_EXPERT = frozenset({"qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"})
_COUNT_NAMES = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN_NAMES = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    *("experts_per_token", "top_k_experts"),
)
_SIZE_NAMES = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_SIZE_NAMES = (
    *("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
)
_SHARED_COUNT_NAMES = (
    *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
)


class ExpertShape(msgspec.Struct, frozen=True):
    """The experts (alternative MLPs, of which each token uses a few) of one layer of a model.

    count        routed experts; 0: the model is dense
    per_token    routed experts that one token uses
    size         width of a routed expert
    latent       width of what routed experts read and write
    shared_size  width of all shared experts together; 0: there are none
    router       parameters of the router, and of the projections around the experts
    """

    count: int = 0
    per_token: int = 0
    size: int = 0
    latent: int = 0
    shared_size: int = 0
    router: float = 0.0


def expert_count(config: ConfigMembers) -> int:
    """Return the number of routed experts per layer; 0 for a dense model.

    Raises ConfigError if the file has experts that are described in an unknown way.
    """
    found = config.first(*_COUNT_NAMES)
    if found is None and config.first(*_SIZE_NAMES, *_PER_TOKEN_NAMES) is not None:
        raise ConfigError(
            "config.json has members of a mixture of experts, but not their number "
            f"({' or '.join(_COUNT_NAMES)})"
        )
    return found or 0


def expert_shape(config: ConfigMembers) -> ExpertShape:
    """Read the sizes of a model's experts from its config.json. The model must have experts.

    Raises ConfigError if a token uses more experts than there are.
    """
    count, width = expert_count(config), config.count("hidden_size")
    per_token = config.first(*_PER_TOKEN_NAMES) or 1
    if not 1 <= per_token <= count:
        raise ConfigError(f"config.json: num_experts_per_tok must be 1 to {count}, not {per_token}")
    narrow = config.optional("intermediate_size", config.intermediate)
    size = config.first(*_SIZE_NAMES) or narrow
    latent = config.optional("moe_latent_size", width)
    router: float = count * (width + (config.family in _ROUTER_BIAS))
    router += width if config.family in _GATED_SHARED_EXPERT else 0
    router += 2 * width * latent if latent != width else 0
    return ExpertShape(count, per_token, size, latent, _shared_size(config, size), router)


def _shared_size(config: ConfigMembers, size: int) -> int:
    if config.family == "llama4_text":
        return size
    if (whole := config.first(*_SHARED_SIZE_NAMES)) is not None:
        return whole
    each = config.optional("moe_shared_expert_intermediate_size", size)
    return each * (config.first(*_SHARED_COUNT_NAMES) or 0)


def expert_layers(config: ConfigMembers, layers: int) -> int:
    """Return the number of layers whose MLP is a mixture of experts."""
    if not expert_count(config):
        return 0
    listed = _listed_layers(config, layers)
    if listed is not None:
        return sum(listed)
    if config.has("expert_layer_period"):
        period = config.count("expert_layer_period")
        offset = config.optional("expert_layer_offset", 0)
        return sum(place % period == offset for place in range(layers))
    step = config.first("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    dense: Any = config.get("mlp_only_layers") or []
    first = config.first("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers") or 0
    last = config.first("moe_layer_end_index") or layers
    return sum(
        first <= place <= last and (place + 1) % (step or 1) == 0 and place not in dense
        for place in range(layers)
    )


def _listed_layers(config: ConfigMembers, layers: int) -> list[bool] | None:
    # Return for each layer whether it has experts, if the file lists that.
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) == "sparse" for kind in kinds]
    flags = config.get("moe_layer_freq")
    if isinstance(flags, list) and len(flags) == layers:
        return [bool(flag) for flag in flags]
    named = config.get("moe_layers_enum")
    if isinstance(named, str) and named:
        places = {part.strip() for part in named.split(",")}
        return [str(place) in places for place in range(layers)]
    return None
