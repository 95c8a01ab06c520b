"""Tests of reading config.json files whose families name or arrange their layers in their own way.

Parameters are counted by hand from the classes of vLLM 0.32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.sizing.gpu_memory import stages
from policies.sizing.hf_config_fields import ConfigError, ConfigMembers
from policies.sizing.hf_parameter_count import shape_from_config
from policies.sizing.hf_state_layers import kimi_attention_places
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout

FOLDER = Path(__file__).parents[3] / "data" / "models"

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
ENDS, NORMS = 2 * 1000 * 256, 256 * 9
ATTENTION, MLP = 2 * 256 * 256 + 2 * 64 * 256, 3 * 256 * 512


def shape(name: str) -> Llm:
    return shape_from_config(json.loads((FOLDER / f"{name}.json").read_text()), name)


def small(**members: Any) -> Llm:
    return shape_from_config(SMALL | members, "small")


def test_the_language_model_of_a_multimodal_file_is_found_under_each_name() -> None:
    for name in ("text_config", "llm_config", "language_config"):
        assert shape_from_config({"model_type": "x", name: SMALL}, "m").params == small().params
    nested = {"model_type": "omni", "thinker_config": {"text_config": SMALL, "audio_config": {}}}
    assert shape_from_config(nested, "m").params == small().params


@pytest.mark.parametrize(
    ("change", "kv_heads"),
    [
        ({"num_key_value_heads": None}, 8),
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 4),
        ({"num_key_value_heads": None, "multi_query_group_num": 2}, 2),
        ({"num_kv_heads": 8, "multi_query": True}, 1),
        ({"num_key_value_heads": 4, "multi_query": True, "new_decoder_architecture": True}, 4),
    ],
)
def test_kv_heads_are_found_under_each_name(change: dict[str, Any], kv_heads: int) -> None:
    model = small(**change)
    assert (model.shardable_kv, model.kv_scalars) == (kv_heads, 2 * kv_heads * 32)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("cohere2", True), ("gemma2", True), ("falcon", True), ("llama", False), ("qwen3", False)],
)
def test_the_output_head_is_the_embedding_where_the_family_says_so(
    family: str, is_tied: bool
) -> None:
    assert small(model_type=family).is_tied == is_tied
    assert not small(model_type=family, tie_word_embeddings=False).is_tied


@pytest.mark.parametrize(
    ("members", "experts", "per_token", "layers"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 8, 2, 4),
        ({"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1}, 8, 2, 3),
        ({"moe_num_experts": 8, "moe_top_k": 3, "moe_layers_enum": "1,3"}, 8, 3, 2),
        ({"num_experts": 8, "moe_topk": [2, 2, 2, 2]}, 8, 2, 4),
        ({"n_routed_experts": 8, "moe_topk": 2, "moe_layer_freq": [0, 1, 1, 1]}, 8, 2, 3),
        ({"num_experts": 8, "mlp_layer_types": ["dense", *["sparse"] * 3]}, 8, 1, 3),
        ({"num_experts": 8, "num_experts_per_tok": 4, "num_dense_layers": 2}, 8, 4, 2),
        ({"num_experts": 8, "moe_layer_interval": 2, "moe_layer_end_index": 2}, 8, 1, 1),
    ],
)
def test_experts_are_found_under_each_name(
    members: dict[str, Any], experts: int, per_token: int, layers: int
) -> None:
    model = small(moe_intermediate_size=128, **members)
    assert (model.experts, model.experts_per_token, model.moe_layers) == (
        experts,
        per_token,
        layers,
    )
    assert model.expert_params == layers * experts * 3 * 256 * 128


@pytest.mark.parametrize(
    ("members", "shared"),
    [
        ({"n_shared_experts": 2}, 2 * 128),
        ({"num_shared_experts": 1, "moe_shared_expert_intermediate_size": 640}, 640),
        ({"moe_num_shared_experts": 2}, 2 * 128),
        ({"num_shared_expert": [1, 1, 1, 1]}, 128),
        ({"shared_intermediate_size": 768}, 768),
        ({"share_expert_dim": 320}, 320),
    ],
)
def test_shared_experts_are_found_under_each_name(members: dict[str, Any], shared: int) -> None:
    plain = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    assert small(**plain, **members).params - small(**plain).params == 4 * 3 * 256 * shared


def test_experts_in_an_unknown_form_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts, but not their number"):
        small(num_experts_per_tok=2, expert_groups=8)


def test_blocks_whose_weights_several_layers_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_mem_blocks"):
        small(model_type="zamba2", num_mem_blocks=2, mamba_d_state=64, hybrid_layer_ids=[1, 3])


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    for family in ("nemotron_h", "arcee", "apertus"):
        assert small(model_type=family).params == small().params - 4 * 256 * 512


def test_experts_of_a_latent_width_are_smaller() -> None:
    members = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = small(**members, moe_latent_size=64)
    assert model.expert_params == 4 * 8 * 3 * 64 * 128
    assert model.params - small(**members).params == 4 * (2 * 256 * 64 - 8 * 3 * 192 * 128)


STATES: dict[str, tuple[dict[str, Any], float, float]] = {
    # family: members, parameters and bytes of state of one layer
    "kimi delta": (
        {
            "linear_attn_config": {
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 64,
                "short_conv_kernel_size": 4,
            }
        },
        4 * 256 * 256 + 3 * 256 * 4 + 2 * (256 * 64 + 64 * 256) + 256 + 4 + 256 * 4 + 64,
        256 * 64 * 4 + 3 * 256 * 3 * 2,
    ),
    "lightning attention": (
        {"attn_type_list": [0, 0, 0, 1]},
        5 * 256 * 256 + 256,
        256 * 32 * 4,
    ),
    "short convolution": (
        {"layer_types": ["conv", "conv", "conv", "full_attention"], "conv_L_cache": 3},
        256 * 3 * 256 + 256 * 3 + 256 * 256,
        256 * 2 * 2,
    ),
    "mamba 1": (
        {"attn_layer_indices": [3], "mamba_d_state": 16, "mamba_dt_rank": 16},
        256 * 2 * 512 + 512 * (5 + 16 + 32 + 16 + 16 + 2) + 512 * 256,
        512 * (16 + 3) * 2,
    ),
    "mamba 2": (
        {"layers_block_type": ["mamba"] * 3 + ["attention"], "mamba_d_state": 64}
        | {"mamba_n_heads": 8, "mamba_n_groups": 1},
        256 * (512 + 640 + 8) + 640 * 5 + 3 * 8 + 512 + 512 * 256,
        (512 * 64 + 640 * 3) * 2,
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_layers_with_a_state_are_counted_by_hand(kind: str) -> None:
    members, params, state_bytes = STATES[kind]
    model = small(**members)
    assert (model.states, model.kv_layers) == (3, 1)
    assert model.state_bytes == 3 * state_bytes
    assert model.params == ENDS + NORMS + 4 * MLP + ATTENTION + 3 * params


def test_kimi_linear_counts_its_layers_with_full_attention_from_one() -> None:
    members = ConfigMembers({"linear_attn_config": {"full_attn_layers": [2, 4, 9]}})
    assert kimi_attention_places(members, 4) == [1, 3]
    assert kimi_attention_places(ConfigMembers({}), 4) is None


def test_a_wide_state_has_four_bytes_per_scalar() -> None:
    members = STATES["mamba 2"][0]
    wide = small(**members, mamba_ssm_dtype="float32")
    assert wide.state_bytes - small(**members).state_bytes == 3 * 512 * 64 * 2


def test_layers_with_attention_and_a_state_have_both() -> None:
    members = {"mamba_d_state": 64, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_ssm": 512}
    model = small(model_type="falcon_h1", **members)
    assert (model.states, model.kv_layers) == (4, 4)
    assert model.params == ENDS + NORMS + 4 * (MLP + ATTENTION + STATES["mamba 2"][1])


def test_words_of_nemotron_h_are_read_as_its_letters() -> None:
    members = {"model_type": "nemotron_h", "ssm_state_size": 16, "mamba_num_heads": 8}
    members |= {"mamba_head_dim": 64, "n_routed_experts": 4, "moe_intermediate_size": 128}
    words = ["mamba", "moe", "attention", "mlp"]
    by_letter = small(**members, hybrid_override_pattern="ME*-")
    by_word = small(**members, layers_block_type=words, num_hidden_layers=None)
    assert by_word == by_letter
    assert (by_word.states, by_word.kv_layers, by_word.moe_layers) == (1, 1, 1)
    three = small(**members, hybrid_override_pattern="MM*M")
    assert three.state_group_params == 3 * by_letter.state_group_params
    assert by_letter.state_group_params == 2 * 16 * (256 + 4 + 1)


def test_layers_that_share_a_cache_have_no_key_and_value_projections() -> None:
    own, sharing = small(), small(num_kv_shared_layers=1)
    assert sharing.kv_token_bytes == own.kv_token_bytes * 3 / 4
    assert own.params - sharing.params == 2 * 64 * 256


def test_mlps_of_layers_that_share_a_cache_may_be_twice_as_wide() -> None:
    usual, wide = (
        small(num_kv_shared_layers=2, use_double_wide_mlp=is_wide) for is_wide in (False, True)
    )
    assert wide.params - usual.params == 2 * MLP


@pytest.mark.parametrize(
    ("members", "width"),
    [
        ({"block_ff_dim": 1000}, 768),
        ({"block_ff_dim": 1000, "block_ffn_dim_multiplier": 1.5}, 1024),
        ({"block_ff_dim": 1000, "block_multiple_of": 100}, 700),
        ({"block_ff_dim": 1000, "block_auto_adjust_ff_dim": False}, 1000),
    ],
)
def test_the_mlp_of_lfm2_has_two_thirds_of_its_width_rounded_up(
    members: dict[str, Any], width: int
) -> None:
    assert small(**members).params == small(intermediate_size=width).params


def test_the_mlp_of_falcon_is_four_times_as_wide_as_the_model_unless_it_says_otherwise() -> None:
    usual, same, narrow = (
        small(model_type="falcon", **members)
        for members in ({}, {"ffn_hidden_size": 1024}, {"ffn_hidden_size": 512})
    )
    assert usual == same
    assert usual.params > narrow.params


def test_inputs_of_every_layer_are_counted_by_hand() -> None:
    # Gemma 4: an embedding and a projection per layer, then a gate, a projection back and a norm.
    plain, inputs = small(), small(hidden_size_per_layer_input=16)
    divided, on_each_rank = 4 * 16 * (1000 + 256), 4 * (2 * 256 * 16 + 256) + 16
    assert inputs.params - plain.params == divided + on_each_rank
    assert inputs.replicated_params - plain.replicated_params == on_each_rank
    fewer = small(hidden_size_per_layer_input=16, vocab_size_per_layer_input=400)
    assert inputs.params - fewer.params == 4 * 16 * 600
    # Gemma 3n: AltUp's projections between 4 streams, and LAuReL of rank 32.
    streams = small(hidden_size_per_layer_input=16, altup_num_inputs=4, laurel_rank=32)
    divided, on_each_rank = 2 * 3 * 256**2 + 4 * 2 * 256 * 32, 4 * (4 * 256 + 4**3 + 4**2 + 2 * 256)
    assert streams.params - inputs.params == divided + on_each_rank
    assert streams.replicated_params - inputs.replicated_params == on_each_rank


def test_layers_with_a_window_may_have_other_heads() -> None:
    gemma = shape("gemma-4-31b")
    assert (gemma.kv_layers, gemma.window_layers, gemma.window) == (60, 50, 1024)
    assert (gemma.kv_scalars, gemma.window_kv_scalars) == (2 * 4 * 512, 2 * 16 * 256)
    assert gemma.kv_token_bytes == 2 * (10 * 4_096 + 50 * 8_192)
    mimo = small(
        sliding_window=128,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        head_dim=48,
        v_head_dim=32,
        swa_num_key_value_heads=4,
    )
    assert (mimo.kv_scalars, mimo.window_kv_scalars) == (2 * 80, 4 * 80)


def test_ranks_beyond_the_heads_of_one_kind_of_layer_still_divide_the_others() -> None:
    # Eight ranks: each has one of 4 heads of 512 in 10 layers, and two of 16 heads of 256 in 50.
    gemma = shape("gemma-4-31b")
    on_rank = 2 * (10 * 2 * 512 + 50 * 2 * 2 * 256)
    assert gemma.kv_rank_bytes(8) == pytest.approx(on_rank, rel=1e-9)
    assert gemma.kv_rank_bytes(4) == gemma.kv_token_bytes / 4
    (stage,) = stages(gemma, Layout(8))
    split = gemma.params - gemma.kv_proj_params - gemma.replicated_params
    projections = 5376 * on_rank / 2
    expected = split / 8 + projections + gemma.replicated_params
    assert stage.weights_bytes == pytest.approx(2 * expected, rel=1e-9)
    # Both kinds of layers have blocks of equal size then: a group of 10 layers for the window's 50.
    kept = 10 * 65_536 + 50 * (1_023 + 2_048 + 1 + 16)
    assert gemma.reserved_tokens(65_536, 8, 2_048) * 60 == pytest.approx(kept, rel=1e-9)


def test_a_state_of_mamba_2_takes_a_third_block_for_prefills() -> None:
    two, one = small(**STATES["mamba 2"][0]), small(**STATES["mamba 1"][0])
    assert (two.state_copies, one.state_copies) == (3, 2)
    # Blocks of 272 tokens hold a state of 69,376 bytes beside 256 bytes of KV per token.
    assert two.reserved_tokens(1_000, 1, 2_048, 16) == 4 * 272 + 3 * 3 * 272


def test_each_rank_has_the_only_group_of_mamba_2() -> None:
    members = STATES["mamba 2"][0]
    one = small(**members)
    assert one.state_group_params == 3 * 2 * 64 * (256 + 4 + 1)
    assert small(**members | {"mamba_n_groups": 2}).state_group_params == 0
    (whole,), (half,) = stages(one, Layout(1)), stages(one, Layout(2))
    on_each = one.replicated_params + one.state_group_params
    assert whole.weights_bytes == 2 * one.params
    assert half.weights_bytes == pytest.approx(one.params + on_each, rel=1e-9)


def test_the_indexer_of_sparse_attention_has_weights_and_a_cache() -> None:
    # vLLM's class (models/deepseek_v32/attention.py): 128 bytes and a scale of 4 per token.
    glm = shape("glm-5")
    assert glm.extra_kv_bytes == 132
    assert glm.kv_token_bytes == 78 * (576 * 2 + 132)
    members = json.loads((FOLDER / "glm-5.json").read_text())
    plain = {name: value for name, value in members.items() if not name.startswith("index_")}
    each = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert glm.params - shape_from_config(plain, "plain").params == 78 * each
    every_fourth = shape_from_config(members | {"index_topk_freq": 4}, "shared")
    # Layers 0 and 1, then every fourth one from layer 5 on.
    assert glm.params - every_fourth.params == (78 - 21) * each


def test_what_a_checkpoint_leaves_unquantised_keeps_two_bytes() -> None:
    kimi = shape("kimi-k2-thinking")
    assert kimi.weight_bytes == 0.5 + 2 / 32
    others = kimi.params - kimi.expert_params
    dense = 3 * 7168 * 18432
    expected = kimi.expert_params * 0.5625 + dense * 0.5625 + (others - dense) * 2
    assert kimi.weights_bytes == pytest.approx(expected, rel=1e-9)
    # The published checkpoint has 594 GB.
    assert kimi.weights_bytes == pytest.approx(594e9, rel=0.01)
