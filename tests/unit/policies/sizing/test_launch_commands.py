"""Tests of generated engine commands, which must equal published ones."""

from __future__ import annotations

import shlex

import pytest

from policies.sizing.launch_commands import (
    EngineLaunch,
    sglang_command,
    trtllm_options,
    vllm_command,
)
from policies.sizing.parallel_layout import Layout

LLAMA, DEEPSEEK = "meta-llama/Llama-3.1-70B-Instruct", "deepseek-ai/DeepSeek-V3-0324"


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


@pytest.mark.parametrize(
    ("published", "launch"),
    [
        (
            """vllm serve meta-llama/Llama-3.1-70B-Instruct \\
--tensor-parallel-size 8""",
            EngineLaunch(LLAMA, Layout(8)),
        ),
        (
            """vllm serve <big-model> \\
--tensor-parallel-size 8 \\
--pipeline-parallel-size 2""",
            EngineLaunch("<big-model>", Layout(8, 2)),
        ),
        (
            """vllm serve deepseek-ai/DeepSeek-V3-0324 \\
--tensor-parallel-size 1 \\
--data-parallel-size 8 \\
--enable-expert-parallel""",
            EngineLaunch(DEEPSEEK, Layout(1, ep=8, dp=8)),
        ),
    ],
)
def test_vllm_is_launched_as_published(published: str, launch: EngineLaunch) -> None:
    assert words(vllm_command(launch)) == words(published)


def test_vllm_exchanges_tokens_of_experts_by_a_backend_and_balances_them() -> None:
    published = """vllm serve deepseek-ai/DeepSeek-V3-0324 \\
--tensor-parallel-size 1 \\
--data-parallel-size 16 \\
--enable-expert-parallel \\
--all2all-backend deepep_low_latency \\
--enable-eplb \\
--eplb-config '{"num_redundant_experts": 32}'"""
    launch = EngineLaunch(
        DEEPSEEK,
        Layout(1, ep=16, dp=16),
        all_to_all="deepep_low_latency",
        has_eplb=True,
        spare_experts=32,
    )
    assert words(vllm_command(launch)) == words(published)


def test_flags_of_experts_are_left_out_for_a_layout_without_them() -> None:
    launch = EngineLaunch(LLAMA, Layout(8), all_to_all="deepep_low_latency", has_eplb=True)
    assert vllm_command(launch) == vllm_command(EngineLaunch(LLAMA, Layout(8)))


def test_vllm_is_launched_as_a_module_as_published() -> None:
    published = """python -m vllm.entrypoints.openai.api_server \\
  --model meta-llama/Llama-3.1-70B-Instruct \\
  --tensor-parallel-size 4 \\
  --dtype bfloat16 \\
  --max-model-len 8192
"""
    launch = EngineLaunch(LLAMA, Layout(4), dtype="bfloat16", max_model_len=8192)
    assert vllm_command(launch, is_module=True) == published


def test_sglang_is_launched_as_published() -> None:
    published = """python -m sglang.launch_server \\
--model-path deepseek-ai/DeepSeek-V3 \\
--tp-size 8 \\
--ep-size 8 \\
--enable-dp-attention --dp-size 8 \\
--enable-eplb # expert-parallelism load balancer"""
    launch = EngineLaunch("deepseek-ai/DeepSeek-V3", Layout(1, ep=8, dp=8), has_eplb=True)
    assert words(sglang_command(launch)) == words(published)


def test_trtllm_is_configured_as_published_but_is_not_parsed_by_it() -> None:
    published = """tensor_parallel_size: 8
pipeline_parallel_size: 1
moe_tensor_parallel_size: 4
moe_expert_parallel_size: 2
"""
    assert trtllm_options(EngineLaunch("m", Layout(8, ep=2))) == published


def test_a_plan_sets_length_batch_types_name_and_port() -> None:
    launch = EngineLaunch(
        *("m", Layout(2, 2, cp=2), "served", None, "fp8", "fp8", 8192, 24, 8001),
    )
    vllm, sglang = words(vllm_command(launch)), words(sglang_command(launch))
    for flag, value in (
        ("--pipeline-parallel-size", "2"),
        ("--decode-context-parallel-size", "2"),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "fp8"),
        ("--max-model-len", "8192"),
        ("--max-num-seqs", "24"),
        ("--served-model-name", "served"),
        ("--port", "8001"),
    ):
        assert vllm[vllm.index(flag) + 1] == value
    for flag, value in (("--context-length", "8192"), ("--max-running-requests", "24")):
        assert sglang[sglang.index(flag) + 1] == value
    yaml = trtllm_options(launch)
    assert "max_batch_size: 24\nmax_seq_len: 8192\nkv_cache_config: {dtype: fp8}\n" in yaml


def test_attention_with_dp_is_enabled_in_trtllm() -> None:
    assert "enable_attention_dp: true" in trtllm_options(EngineLaunch("m", Layout(1, ep=8, dp=8)))
