"""Tests of simulated step times with pipeline, expert, data and context parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.main import run as penstock
from mockgpu.timing.layout_times import LayoutTimes, rank_model, step_times_for
from mockgpu.timing.roofline import Roofline, StepTimes, StepWork
from mockgpu.timing.step_time_grids import load_grids, roofline_for
from mockgpu.tp_group import GroupSpec
from planner.replay.fleet_spec import FleetError, FleetSpec, GroupKind, validate
from policies.sizing.gpu_memory import Demand, check_memory, stages
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout
from tests.command_runner import CommandRunner

GRIDS = load_grids()
H100, H200 = gpu_named("h100"), gpu_named("h200")
L405, L70, DEEPSEEK = (model_named(m) for m in ("llama-3.1-405b", "llama-3.1-70b", "deepseek-v3"))
PROMPT = StepWork(6000, 6000 * 3000)


def times(layout: Layout, model: str = "llama-3.1-405b", skew: float = 1.0) -> StepTimes:
    gpu = H200 if model == "deepseek-v3" else H100
    return step_times_for(model_named(model), gpu, layout, skew=skew, grids=GRIDS)


def decode(seqs: int, context: int = 4096) -> StepWork:
    return StepWork(0, 0.0, seqs, seqs * context)


def test_tp_alone_is_the_measured_roofline() -> None:
    one = times(Layout(8), "llama-3.1-70b")
    assert isinstance(one, Roofline)
    assert one.step_s(decode(16)) == roofline_for(L70, H100, 8, grids=GRIDS).step_s(decode(16))


def test_a_prompt_alone_passes_all_stages_and_half_of_them_wait() -> None:
    # The pipeline is empty: with two stages, each is idle while the other computes.
    alone = times(Layout(8)).step_s(PROMPT)
    assert times(Layout(8, 2)).step_s(PROMPT) == pytest.approx(alone, rel=0.01)


def test_two_full_micro_batches_share_a_pipeline_and_pay_for_filling_it() -> None:
    full = StepWork(16_384, 16_384 * 4096)
    half = StepWork(8192, 8192 * 4096)
    one, two = times(Layout(8)), times(Layout(8, 2))
    # A step takes three stage times: one to fill the pipeline, and one for each micro-batch.
    assert two.step_s(full) == pytest.approx(1.5 * one.step_s(half), rel=0.01)


def test_decodes_fill_a_pipeline_so_twice_the_batch_takes_the_same_step() -> None:
    one, two = times(Layout(8)), times(Layout(8, 2))
    assert two.step_s(decode(32)) == pytest.approx(one.step_s(decode(16)), rel=0.001)
    # A single sequence gains nothing: it passes all stages, one after the other.
    assert two.step_s(decode(1)) >= one.step_s(decode(1))


def test_the_kv_cache_of_a_pipeline_is_that_of_its_largest_stage() -> None:
    spec = GroupSpec("m", L405, H100, tp=8, pp=4)
    layout = Layout(8, 4)
    check = check_memory(L405, H100, layout, Demand(1))
    assert spec.capacity_tokens == check.tokens
    assert check.kv_token_bytes == max(stage.kv_token_bytes for stage in stages(L405, layout))
    assert GroupSpec("m", L405, H100, tp=8, pp=2).capacity_tokens == 530_687


@pytest.mark.parametrize("work", [decode(256), StepWork(8192, 8192 * 4096)])
def test_the_busiest_expert_rank_delays_the_experts_part_of_a_step(work: StepWork) -> None:
    layout = Layout(1, ep=8, dp=8)
    even, skewed, twice = (
        times(layout, "deepseek-v3", skew).step_s(work) for skew in (1.0, 1.5, 2.0)
    )
    assert twice - even == pytest.approx(2 * (skewed - even), rel=1e-6)
    assert even < twice < 2 * even, "attention and dense layers are not delayed"


def test_skew_does_not_change_a_dense_model() -> None:
    assert isinstance(times(Layout(8), "llama-3.1-70b", 4.0), Roofline)


def test_attention_on_eight_ranks_holds_and_serves_eight_parts_of_a_batch() -> None:
    one = times(Layout(8, ep=8), "deepseek-v3").step_s(decode(64))
    eight = times(Layout(1, ep=8, dp=8), "deepseek-v3").step_s(decode(512))
    assert eight < 8 * one
    assert rank_model(DEEPSEEK, Layout(1, ep=8, dp=8)).expert_params * 8 == pytest.approx(
        DEEPSEEK.expert_params
    )


def test_context_parallel_ranks_divide_a_prompt_and_not_a_decode() -> None:
    one, four = times(Layout(4), "llama-3.1-70b"), times(Layout(4, cp=4), "llama-3.1-70b")
    long = StepWork(8192, 8192 * 100_000)
    assert four.step_s(long) == pytest.approx(one.step_s(long) / 4, rel=0.05)
    assert four.step_s(decode(8)) == one.step_s(decode(8))


@given(
    st.integers(0, 20_000), st.integers(0, 64), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2))
)
def test_more_work_never_takes_less_time(tokens: int, seqs: int, pp: int, dp: int) -> None:
    line = LayoutTimes(
        Roofline(L405, H100, 8, GroupSpec("m", L405, H100).profile),
        *(L405, H100, Layout(8, pp, dp=dp), 8192, 1.0),
    )
    work = StepWork(tokens, tokens * 1000.0, seqs, seqs * 2048)
    more = StepWork(2 * tokens, 2 * tokens * 1000.0, 2 * seqs, 2 * seqs * 2048)
    assert line.step_s(more) >= line.step_s(work) * (1 - 1e-9) >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-3.1-8b", "--ep", "2", "--tp", "2"], "a model without experts"),
        (["--model", "llama-3.1-8b", "--pp", "40"], "32 layers cannot fill pp 40"),
        (["--dialect", "vllm_nixl", "--pp", "2"], "supports only tensor parallelism"),
    ],
)
def test_layouts_with_which_no_engine_starts_are_refused(options: list[str], message: str) -> None:
    result = CommandRunner().invoke(penstock, ["mock", "--port", "0", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_fleet_of_a_replay_may_have_pipelines_and_experts() -> None:
    kind = GroupKind("deepseek-v3", "h200", 1, ep=8, dp=8, ep_skew=1.2)
    assert validate(FleetSpec("f", (kind,))).groups[0].layout.gpus == 8
    assert kind.capacity_tokens > 2_000_000
    with pytest.raises(FleetError, match="128 attention heads cannot be divided"):
        validate(FleetSpec("f", (GroupKind("deepseek-v3", "h200", 5, ep=5),)))
    with pytest.raises(FleetError, match="ep_skew"):
        validate(FleetSpec("f", (GroupKind(ep_skew=0.5),)))
