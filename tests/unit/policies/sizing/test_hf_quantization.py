"""Tests of reading the format of quantised weights from config.json, as tools write it."""

from __future__ import annotations

from typing import Any

import pytest

from policies.sizing.hf_config_fields import ConfigError
from policies.sizing.hf_quantization import weight_format


def compressed(weights: dict[str, Any], **members: Any) -> dict[str, Any]:
    # A section of llm-compressor, with activations of 8 bits listed before the weights.
    group = {"input_activations": {"num_bits": 8}, "weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {"group_0": group},
    } | members


@pytest.mark.parametrize(
    ("section", "bytes_each"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "fbgemm_fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.51953125),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, 0.5390625),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, 0.51953125),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}, 1.0),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, 0.515625),
        (compressed({"num_bits": 8, "type": "float", "strategy": "channel"}), 1.0),
        (compressed({"num_bits": 4, "type": "int", "group_size": 32}), 0.5625),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), 0.5625),
        (compressed({"num_bits": 4, "type": "float", "group_size": 32}), 0.53125),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 0.5625),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}},
            0.5625,
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            1.0,
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "input_tensors": {"dtype": "fp8_e4m3"},
                    "weight": [{"dtype": "fp4", "group_size": 32}],
                },
            },
            0.53125,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8Config"}}}, 1.0),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.515625),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
            },
            0.53125,
        ),
        ({"quant_method": "mxfp4"}, 0.53125),
    ],
)
def test_the_bytes_of_a_weight_include_the_scales_of_its_group(
    section: dict[str, Any], bytes_each: float
) -> None:
    assert weight_format(section).weight_bytes == bytes_each


@pytest.mark.parametrize("section", [None, [], "fp8"])
def test_without_a_section_weights_have_two_bytes(section: object) -> None:
    assert weight_format(section).weight_bytes == 2.0


def test_modules_that_are_not_quantised_keep_two_bytes() -> None:
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    form = weight_format(compressed({"num_bits": 4, "group_size": 32}, ignore=ignored))
    assert (form.keeps_attention, form.keeps_shared) == (True, True)
    one_layer = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}
    assert not weight_format(one_layer).keeps_attention
    all_layers = [f"model.layers.{layer}.self_attn*" for layer in range(61)]
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": all_layers}
    assert weight_format(section).keeps_attention


@pytest.mark.parametrize(
    "section", [{"quant_method": "magic"}, {"quant_method": "modelopt", "quant_algo": "MIXED"}]
)
def test_an_unknown_format_is_refused_with_the_known_ones(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="known are fp8, mxfp4, nvfp4, bitsandbytes"):
        weight_format(section)
