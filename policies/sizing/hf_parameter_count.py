"""Reads a model's shape from its Hugging Face config.json, and counts parameters tensor by tensor.

The input is plain data. Supported are decoders with MHA, GQA or MLA; dense MLPs and mixtures of
experts; full, sliding-window and state-space layers. Sources: the modelling code of the
`transformers` library and of vLLM for these families.
"""

from __future__ import annotations

from typing import Any

import msgspec

from policies.sizing.hf_attention import AttentionShape, attention_shape
from policies.sizing.hf_config_fields import ConfigError, ConfigMembers, language_model
from policies.sizing.hf_experts import ExpertShape, expert_shape
from policies.sizing.hf_layer_kinds import LayerKinds, layer_kinds
from policies.sizing.hf_quantization import weight_format
from policies.sizing.model_shapes import Llm

# Families whose MLP has two matrices; all others have a gate as the third.
_UNGATED = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "mpt"),
        *("starcoder2", "nemotron", "nemotron_h", "arcee", "apertus"),
    }
)
_SANDWICH_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text"})


def shape_from_config(config: Any, name: str) -> Llm:
    """Return the shape of the model that a parsed config.json describes.

    A multimodal configuration describes its language model in a section such as `text_config`;
    other parts are not counted. Raises ConfigError (a ValueError) if the model is not supported.
    """
    members = ConfigMembers(language_model(config))
    members.require("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if members.has("num_mem_blocks"):
        raise ConfigError(
            "config.json: num_mem_blocks: transformer blocks whose weights several layers use "
            "(Zamba) are not supported"
        )
    if members.family != "falcon":
        names = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "block_ff_dim")
        members.require_one(*names)
    return _assemble(members, layer_kinds(members), name)


def _assemble(config: ConfigMembers, kinds: LayerKinds, name: str) -> Llm:
    width, layers = config.count("hidden_size"), kinds.layers
    attention = attention_shape(config, kinds)
    experts = expert_shape(config) if kinds.moe_layers else ExpertShape()
    form = weight_format(config.get("quantization_config") or config.get("compression_config"))
    embedding = config.count("vocab_size") * width
    ends = embedding if config.is_tied else 2 * embedding
    norms = width * (_norms_per_layer(config) * layers + 1)
    routers = kinds.moe_layers * experts.router
    extra_split, extra_replicated = _per_layer_inputs(config, layers)
    replicated = attention.replicated_params + norms + routers + extra_replicated
    shared = kinds.moe_layers * _mlp(config, experts.shared_size)
    routed = kinds.moe_layers * experts.count * _expert(config, experts)
    params = ends + replicated + attention.params + kinds.state_params + shared + routed
    params += extra_split
    params += _dense_mlps(config, kinds)
    idle = routed * (1 - experts.per_token / max(1, experts.count))
    kept = params - routed
    if not form.only_experts:
        kept = ends + replicated + (attention.params if form.keeps_attention else 0)
        kept += shared if form.keeps_shared else 0
    shape = Llm(
        *(name, layers, width, config.count("num_attention_heads"), attention.head_dim),
        *(attention.kv_scalars, attention.shardable_kv, params, params - idle, form.weight_bytes),
        max_context=config.max_context,
        embedding_params=embedding,
        is_tied=config.is_tied,
        expert_params=routed,
        replicated_params=replicated,
        bf16_params=kept if form.weight_bytes < 2 else 0.0,
    )
    return _with_kinds(shape, kinds, experts, attention)


def _with_kinds(
    shape: Llm, kinds: LayerKinds, experts: ExpertShape, attention: AttentionShape
) -> Llm:
    return msgspec.structs.replace(
        shape,
        experts=experts.count,
        experts_per_token=experts.per_token,
        moe_layers=kinds.moe_layers,
        kv_proj_params=attention.kv_params,
        window_layers=kinds.window_layers,
        window=kinds.window,
        window_kv_scalars=attention.window_kv_scalars,
        window_shardable_kv=attention.window_shardable_kv,
        extra_kv_bytes=attention.extra_kv_bytes,
        state_layers=kinds.layers - kinds.cached_layers,
        states=kinds.states,
        state_group_params=kinds.state_group_params,
        state_bytes=kinds.state_bytes,
        state_copies=kinds.state_copies,
    )


def _norms_per_layer(config: ConfigMembers) -> int:
    if config.has("hybrid_override_pattern"):
        return 1
    return 4 if config.family in _SANDWICH_NORMS else 2


def _dense_mlps(config: ConfigMembers, kinds: LayerKinds) -> float:
    # Return the parameters of all dense MLPs. Gemma 4 has one beside the experts, and wider ones in
    # layers that read the cache of another.
    is_beside = config.flag("enable_moe_block")
    layers: float = kinds.mlps - (0 if is_beside else kinds.moe_layers)
    if config.flag("use_double_wide_mlp"):
        layers += kinds.attention_layers - kinds.cached_layers
    return layers * _mlp(config, _dense_size(config))


def _per_layer_inputs(config: ConfigMembers, layers: int) -> tuple[float, float]:
    # Return the parameters of Gemma 3n's and 4's inputs of every layer, and of Gemma 3n's AltUp and
    # LAuReL: those that ranks divide, and those that each rank has.
    width, each = config.count("hidden_size"), config.optional("hidden_size_per_layer_input", 0)
    if not each:
        return 0.0, 0.0
    vocabulary = config.optional("vocab_size_per_layer_input", config.count("vocab_size"))
    split = layers * each * (vocabulary + width)
    replicated = layers * (2 * width * each + width) + each
    if config.has("altup_num_inputs"):
        inputs, rank = config.count("altup_num_inputs"), config.optional("laurel_rank", 64)
        split += 2 * (inputs - 1) * width**2 + layers * 2 * width * rank
        replicated += layers * (inputs * width + inputs**3 + inputs**2 + 2 * width)
    return split, replicated


def _dense_size(config: ConfigMembers) -> int:
    # Return the width of a dense MLP.
    if config.has("block_ff_dim"):
        # LFM2 rounds two thirds of it up.
        size, step = config.count("block_ff_dim"), config.optional("block_multiple_of", 256)
        if config.flag("block_auto_adjust_ff_dim", True):
            size = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
            return -(-size // step) * step
        return size
    if config.family == "falcon":
        return config.optional("ffn_hidden_size", 4 * config.count("hidden_size"))
    return config.intermediate


def _expert(config: ConfigMembers, experts: ExpertShape) -> float:
    matrices = 2 if config.family in _UNGATED else 3
    biases = 2 * experts.size + experts.latent if config.family == "gpt_oss" else 0
    return matrices * experts.latent * experts.size + biases


def _mlp(config: ConfigMembers, size: int) -> float:
    return config.count("hidden_size") * size * (2 if config.family in _UNGATED else 3)
