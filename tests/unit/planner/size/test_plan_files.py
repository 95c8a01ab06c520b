"""Tests of the options for expert parallelism in generated engine commands."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from planner.size.plan_files import Emission, emit
from planner.size.workload import Workload
from policies.sizing.parallel_layout import Layout
from tests.unit.planner.size.test_recipe import planned

WORK = Workload(2000, 200, 4096, concurrency=64.0)


@pytest.mark.parametrize(
    ("ranks", "vllm", "sglang"),
    [
        (4, [], []),
        (8, ["--enable-eplb"], ["--enable-eplb"]),
        (
            16,
            ["--all2all-backend deepep_low_latency", "--enable-eplb"],
            ["--enable-eplb", "--moe-a2a-backend deepep"],
        ),
    ],
)
def test_experts_on_many_ranks_are_balanced_and_those_on_several_nodes_have_a_backend(
    ranks: int, vllm: list[str], sglang: list[str]
) -> None:
    plan = replace(planned("deepseek-v3", WORK, "h200"), layout=Layout(1, ep=ranks, dp=ranks))
    emission = Emission(plan, "deepseek-ai/DeepSeek-V3", "deepseek-v3")
    for target, flags in (("vllm", vllm), ("sglang", sglang)):
        lines = [line.strip(" \\") for line in emit(target, emission).splitlines()]
        assert [
            line for line in lines if "eplb" in line or "a2a" in line or "all2all" in line
        ] == flags


def test_a_dense_model_has_no_flags_of_experts() -> None:
    emission = Emission(planned("llama-3.1-70b", WORK), "meta-llama/Llama-3.1-70B", "llama")
    assert "eplb" not in emit("vllm", emission) + emit("sglang", emission)


def test_tensorrt_llm_is_given_a_quantised_checkpoint_for_a_plan_with_fp8_weights() -> None:
    name = "meta-llama/Llama-3.1-70B-Instruct"
    plan = planned("llama-3.1-70b", WORK)
    wanted = f"replace {name} by one"
    assert wanted in emit("trtllm", Emission(plan, name, "llama", is_quantising=True))
    assert wanted not in emit("trtllm", Emission(plan, name, "llama"))
