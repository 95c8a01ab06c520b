"""Tests of reading a model's shape from config.json, and of errors for incomplete files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policies.sizing.gpu_memory import stages
from policies.sizing.hf_config_fields import ConfigError
from policies.sizing.hf_parameter_count import shape_from_config
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import Llm, model_named
from policies.sizing.parallel_layout import Layout

FOLDER = Path(__file__).parents[3] / "data" / "models"


def read(name: str) -> dict[str, Any]:
    members = json.loads((FOLDER / f"{name}.json").read_text())
    assert isinstance(members, dict)
    return members


def shape(name: str) -> Llm:
    return shape_from_config(read(name), name)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_419_200),
        ("gpt-oss-120b", 116_829_156_672),
        ("gemma-3-27b", 27_009_346_304),
        ("gemma-3-4b", 3_880_263_168),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("jamba-mini", 51_570_323_328),
    ],
)
def test_every_parameter_of_a_published_checkpoint_is_counted(name: str, params: int) -> None:
    assert shape(name).params == params


@pytest.mark.parametrize(
    ("name", "active", "weights_gb"),
    [
        ("llama-3.1-8b", 8.030, 16.06),
        ("qwen3-30b-a3b", 3.35, 61.1),
        ("mixtral-8x7b", 12.88, 93.4),
        ("deepseek-v3", 37.55, 674.0),
        ("gpt-oss-120b", 5.71, 65.2),
        ("llama-4-scout", 17.17, 215.5),
        ("jamba-mini", 12.1, 103.1),
    ],
)
def test_active_parameters_and_bytes_are_as_published(
    name: str, active: float, weights_gb: float
) -> None:
    model = shape(name)
    assert model.active_params == pytest.approx(active * 1e9, rel=0.005)
    assert model.weights_bytes == pytest.approx(weights_gb * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "kv_token_bytes", "ranks"),
    [
        ("llama-3.1-70b", 327_680, 8),
        ("qwen3-30b-a3b", 98_304, 4),
        ("deepseek-v3", 70_272, 1),
        ("jamba-mini", 16_384, 8),
    ],
)
def test_kv_per_token_and_the_ranks_that_divide_it(
    name: str, kv_token_bytes: int, ranks: int
) -> None:
    model = shape(name)
    assert (model.kv_token_bytes, model.shardable_kv) == (kv_token_bytes, ranks)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3"])
def test_a_built_in_shape_is_that_of_its_config(name: str) -> None:
    counted, built_in = shape(name), model_named(name)
    assert counted.kv_token_bytes == built_in.kv_token_bytes
    assert counted.params == pytest.approx(built_in.params, rel=0.001)
    assert (counted.layers, counted.heads, counted.experts) == (
        built_in.layers,
        built_in.heads,
        built_in.experts,
    )
    assert counted.expert_params == built_in.expert_params


def test_windows_and_states_are_read_from_patterns() -> None:
    gemma, jamba, oss = shape("gemma-3-27b"), shape("jamba-mini"), shape("gpt-oss-120b")
    assert (gemma.window_layers, gemma.window) == (52, 1024)
    assert (oss.window_layers, oss.window) == (18, 128)
    assert (jamba.state_layers, jamba.moe_layers) == (28, 16)
    # 28 layers keep 8192 channels x (16 states + 3 of the convolution), two bytes each.
    assert jamba.state_bytes == 28 * 8192 * 19 * 2
    assert shape("qwen2.5-7b").window_layers == 0
    # Published files of Gemma 3 name neither their pattern nor, in the smallest, their heads.
    small, qwen = shape("gemma-3-4b"), shape("qwen3-next-80b-a3b")
    assert (small.window_layers, small.window, small.heads, small.shardable_kv) == (29, 1024, 8, 4)
    assert (qwen.state_layers, qwen.kv_token_bytes) == (36, 12 * 2 * 2 * 256 * 2)
    assert qwen.state_bytes == 36 * 2 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)


def test_a_pattern_of_letters_is_read() -> None:
    members = read("llama-3.1-8b") | {
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M-M*M-",
        "ssm_state_size": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
    }
    model = shape_from_config(members, "letters")
    assert (model.layers, model.state_layers, model.moe_layers) == (6, 5, 0)
    assert model.kv_layers == 1
    assert model.state_bytes == 3 * 2 * (4096 * 128 + (4096 + 2 * 8 * 128) * 3)


def test_replicated_parameters_are_on_every_rank() -> None:
    model = shape("qwen3-30b-a3b")
    (one,) = stages(model, Layout(8))
    assert model.kv_proj_params == 48 * 2 * 4 * 128 * 2048
    routers, norms = 48 * 128 * 2048, 2048 * (2 * 48 + 1) + 48 * 2 * 128
    assert model.replicated_params == routers + norms
    kv_heads_twice = model.kv_proj_params * (1 / 4 - 1 / 8) + model.replicated_params * 7 / 8
    assert one.weights_bytes == pytest.approx(2 * (model.params / 8 + kv_heads_twice), rel=1e-6)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    model = shape("llama-3.2-1b")
    held = sum(stage.weights_bytes for stage in stages(model, Layout(pp=4)))
    assert held == pytest.approx(2 * (model.params + model.embedding_params), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks hidden_size, vocab_size"),
        ({"intermediate_size": None}, "lacks intermediate_size (or moe_intermediate_size"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers must be a positive"),
        ({"num_key_value_heads": 7}, "num_key_value_heads (7) must divide the"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must have one entry for each of 80 layers",
        ),
        ({"layer_types": ["linear_attention"] * 80}, "80 layers have no attention"),
        ({"full_attention_interval": 4}, "60 layers have no attention"),
        ({"model_type": "bert"}, "not describe a decoder-only model (model_type 'bert')"),
        ({"is_encoder_decoder": True}, "only decoder-only models can be sized"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic'"),
        ({"kv_lora_rank": 512}, "lacks qk_rope_head_dim, qk_nope_head_dim, v_head_dim"),
    ],
)
def test_an_incomplete_config_is_refused_with_what_is_missing(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_config(read("llama-3.1-70b") | change, "broken")
    assert message in str(caught.value)


@pytest.mark.parametrize("config", [[], "llama", None, 3])
def test_what_is_not_an_object_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match="contain a JSON object"):
        shape_from_config(config, "broken")


@pytest.mark.parametrize(
    ("section", "bytes_each"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            1.0,
        ),
    ],
)
def test_quantised_weights_are_smaller_except_for_the_embeddings(
    section: dict[str, Any], bytes_each: float
) -> None:
    model = shape_from_config(read("llama-3.1-70b") | {"quantization_config": section}, "small")
    kept = 2 * model.embedding_params + model.replicated_params
    expected = (model.params - kept) * bytes_each + 2 * kept
    assert model.weights_bytes == pytest.approx(expected, rel=1e-9)


def test_one_kv_head_is_not_a_latent() -> None:
    one_head = shape_from_config(read("llama-3.1-8b") | {"num_key_value_heads": 1}, "mqa")
    assert (one_head.shardable_kv, one_head.mla) == (1, False)
    assert shape("deepseek-v3").mla
    assert shape("deepseek-v3").head_dim == 128 + 64
    assert shape("deepseek-v3").kv_scalars == 512 + 64
    assert facts_of(one_head).kv_heads == 1
    assert facts_of(shape("deepseek-v3")).kv_heads is None


def test_a_mamba_2_layer_is_counted_by_hand() -> None:
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 100,
        "hybrid_override_pattern": "M*",
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
    }
    # 512 inner scalars, 576 channels of the convolution with B and C of two groups.
    projection_in = 256 * (512 + 576 + 8)
    convolution = 576 * 4 + 576
    per_head = 3 * 8  # A, D and the bias of dt
    state_space = projection_in + convolution + per_head + 512 + 512 * 256
    attention = 2 * 256 * 256 + 2 * 256 * 128
    ends, norms = 2 * 100 * 256, 3 * 256
    assert shape_from_config(small, "s").params == state_space + attention + ends + norms


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 4096}, 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096, "max_window_layers": 28}, 4),
        ({"sliding_window": 4096, "sliding_window_pattern": 4}, 24),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16),
        ({"sliding_window": None}, 0),
    ],
)
def test_layers_with_a_window_are_counted(change: dict[str, Any], windows: int) -> None:
    assert shape_from_config(read("llama-3.1-8b") | change, "w").window_layers == windows


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, 48),
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [0, 1]}, 46),
        ({"first_k_dense_replace": 3}, 45),
        ({"decoder_sparse_step": None, "expert_layer_period": 4, "expert_layer_offset": 1}, 12),
    ],
)
def test_layers_with_experts_are_counted(change: dict[str, Any], layers: int) -> None:
    model = shape_from_config(read("qwen3-30b-a3b") | change, "e")
    assert model.moe_layers == layers
    assert model.expert_params == layers * 128 * 3 * 2048 * 768


def test_the_rank_of_mamba_1_is_a_16th_of_the_width_by_default() -> None:
    members = read("jamba-mini")
    assert members.pop("mamba_dt_rank") == 256
    assert shape_from_config(members, "j").params == shape("jamba-mini").params


def test_layers_with_attention_may_be_listed() -> None:
    listed = {"attn_layer_indices": [3, 9, 99], "mamba_d_state": 16}
    model = shape_from_config(read("llama-3.1-8b") | listed, "l")
    assert model.kv_layers == 2


def test_bits_are_looked_for_in_four_levels_and_no_deeper() -> None:
    section: dict[str, Any] = {"num_bits": 8}
    for _ in range(4):
        section = {"part": section}
    config = read("llama-3.1-8b")
    assert shape_from_config(config | {"quantization_config": section}, "q").weight_bytes == 1.0
    with pytest.raises(ConfigError, match="quant_method"):
        shape_from_config(config | {"quantization_config": {"part": section}}, "q")


@pytest.mark.parametrize(("name", "tokens"), [("gemma-3-27b", 125_406), ("gpt-oss-120b", 727_389)])
def test_layers_with_windows_hold_as_many_tokens_as_vllm_computes(name: str, tokens: int) -> None:
    # vLLM 0.32's own kv_cache_size_tokens in 32 GiB, at 8192 tokens a request, blocks of 128.
    model, context = shape(name), 8192
    kept = model.cached_tokens(context, 2_048, 128) * model.kv_token_bytes
    assert 32 * 2**30 * context / kept == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(("window_layers", "layers_kept"), [(5, (5, 5)), (6, (4, 8))])
def test_layers_with_a_window_are_padded_to_groups_of_layers(
    window_layers: int, layers_kept: tuple[int, int]
) -> None:
    # Up to 1.5 times the other kind, one group of each kind is padded to the larger number.
    layers = 4 + window_layers
    model = msgspec.structs.replace(
        model_named("llama-3.1-8b"), layers=layers, window_layers=window_layers, window=1024
    )
    full, in_window = 16_384, 192 * 16 + 16
    kept = layers_kept[0] * full + layers_kept[1] * in_window
    assert model.cached_tokens(full, 2_048) * layers == kept
