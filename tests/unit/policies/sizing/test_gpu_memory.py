"""Tests of the check that a model fits into GPU memory, with published examples."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.gpu_memory import (
    ENGINE_RESERVE,
    RULE_OF_THUMB,
    Demand,
    MemoryCheck,
    MemoryVerdict,
    check_memory,
    min_gpus,
    stages,
)
from policies.sizing.gpus import GPUS, gpu_named
from policies.sizing.model_shapes import Llm, model_named
from policies.sizing.parallel_layout import Layout, layers_of_stages

HARBOR = Demand(8192, 24)


def checked(
    model: str, gpu: str, layout: Layout, demand: Demand = HARBOR, rule_of_thumb: bool = False
) -> MemoryCheck:
    reserve = RULE_OF_THUMB if rule_of_thumb else ENGINE_RESERVE
    return check_memory(model_named(model), gpu_named(gpu), layout, demand, reserve)


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "verdict"),
    [
        ("llama-3.1-70b", "h100", Layout(1), MemoryVerdict.DOES_NOT_LOAD),
        ("llama-3.1-70b", "h100", Layout(2), MemoryVerdict.SERVES_NONE),
        ("llama-3.1-70b", "h100", Layout(4), MemoryVerdict.SERVES),
        ("llama-3.1-70b-fp8", "h100", Layout(1), MemoryVerdict.SERVES_NONE),
        ("llama-3.1-405b", "h100", Layout(11), MemoryVerdict.SERVES_NONE),
        ("llama-3.1-405b", "h100", Layout(8), MemoryVerdict.DOES_NOT_LOAD),
        ("deepseek-v3", "h100", Layout(8), MemoryVerdict.DOES_NOT_LOAD),
        ("deepseek-v3", "h200", Layout(8), MemoryVerdict.SERVES),
    ],
)
def test_a_layout_does_not_load_or_serves_nothing_or_serves(
    model: str, gpu: str, layout: Layout, verdict: MemoryVerdict
) -> None:
    assert checked(model, gpu, layout).verdict is verdict


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "tokens"),
    [
        ("llama-3.1-70b", "h100", Layout(4), 397_404),
        ("llama-3.1-70b", "h100", Layout(8), 1_225_716),
        ("llama-3.1-70b-fp8", "h100", Layout(2), 198_702),
        ("llama-3.1-70b-fp8", "h100", Layout(4), 612_858),
        ("llama-3.1-405b", "h100", Layout(16), 265_343),
        ("llama-3.1-405b", "h100", Layout(8, 2), 530_687),
        ("llama-3.1-405b", "h100", Layout(8, 4), 2_593_176),
        ("llama-3.1-405b-fp8", "h100", Layout(8), 265_343),
        ("deepseek-v3", "h200", Layout(8), 553_283),
        ("deepseek-v3", "b200", Layout(8), 1_052_771),
    ],
)
def test_the_kv_cache_holds_as_many_tokens_as_computed_by_hand(
    model: str, gpu: str, layout: Layout, tokens: int
) -> None:
    assert checked(model, gpu, layout).tokens == pytest.approx(tokens, rel=0.01)


def test_70b_at_tp_2_serves_no_request_of_8k_although_its_weights_fit() -> None:
    check = checked("llama-3.1-70b", "h100", Layout(2))
    assert check.text == "loads, but serves no request of 8,192 tokens"
    thumb = checked("llama-3.1-70b", "h100", Layout(2), rule_of_thumb=True)
    assert thumb.tokens == pytest.approx(8_544, rel=0.01)


def test_fp8_at_tp_2_holds_24_requests_of_8k_with_1_1_percent_and_is_refused_for_10() -> None:
    check = checked("llama-3.1-70b-fp8", "h100", Layout(2), Demand(8192, 24, 0.10))
    assert check.served == 24
    assert check.spare == pytest.approx(0.0107, abs=0.0005)
    assert not check.is_enough
    wide = checked("llama-3.1-70b-fp8", "h100", Layout(4), Demand(8192, 24, 0.15))
    assert wide.is_enough
    assert wide.spare == pytest.approx(2.12, abs=0.01)


def test_tp_8_with_pp_2_holds_twice_the_kv_of_tp_16_because_there_are_8_kv_heads() -> None:
    wide = checked("llama-3.1-405b", "h100", Layout(16)).tokens
    deep = checked("llama-3.1-405b", "h100", Layout(8, 2)).tokens
    assert deep / wide == pytest.approx(2, rel=0.001)


def test_405b_at_tp_8_with_pp_4_holds_25_gb_per_gpu() -> None:
    check = checked("llama-3.1-405b", "h100", Layout(8, 4))
    assert check.weights_bytes == pytest.approx(25.4e9, rel=0.01)


def test_attention_with_dp_holds_a_cache_per_rank() -> None:
    spread = check_memory(model_named("deepseek-v3"), gpu_named("h200"), Layout(dp=8, ep=8), HARBOR)
    alone = spread.tokens / 8
    # 17.1 GB of attention and shared experts on each rank, and an eighth of 653.9 GB of experts.
    assert spread.weights_bytes == pytest.approx(17.1e9 + 653.9e9 / 8, rel=0.01)
    assert alone == pytest.approx((spread.usable_bytes - spread.weights_bytes) / 70_272, rel=0.01)


def test_405b_needs_11_gpus_by_division_and_fp8_weights_need_6() -> None:
    assert min_gpus(model_named("llama-3.1-405b"), gpu_named("h100")) == 11
    assert min_gpus(model_named("llama-3.1-405b-fp8"), gpu_named("h100")) == 6
    assert min_gpus(model_named("llama-3.1-70b"), gpu_named("h100")) == 2
    assert min_gpus(model_named("llama-3.1-70b-fp8"), gpu_named("h100")) == 1


def test_a_window_layer_keeps_the_window_and_the_steps_in_flight() -> None:
    full = model_named("llama-3.1-8b")
    half = msgspec.structs.replace(full, window_layers=16, window=1024)
    whole = full.kv_token_bytes * 65_536
    for gpu, pp, in_flight in (
        *(("h100", 1, 2 * 8_192), ("h100", 2, 3 * 8_192)),
        *(("b200", 1, 2 * 16_384), ("a100", 1, 2 * 2_048), ("l40s", 1, 2 * 2_048)),
    ):
        in_window = -(-(1024 - 1 + in_flight) // 16) * 16 + 16
        bytes_each = request_bytes(half, gpu, Layout(pp=pp), 65_536)
        assert bytes_each * pp == pytest.approx(whole * (1 + in_window / 65_536) / 2, rel=0.001)


def test_a_layer_with_a_state_keeps_two_in_blocks_as_large_as_a_state() -> None:
    full = model_named("llama-3.1-8b")
    state = msgspec.structs.replace(full, state_layers=16, states=16, state_bytes=16 * 4e6)
    # A layer has 4,096 bytes of KV per token, so 977 tokens hold a state: 992 in blocks of 16.
    blocks = -(-65_536 // 992) + 2
    bytes_each = request_bytes(state, "h100", Layout(), 65_536)
    assert bytes_each == pytest.approx(blocks * 992 * 16 * 4_096, rel=0.001)
    # Two ranks have half of the heads and half of the state each.
    two = request_bytes(state, "h100", Layout(2), 65_536)
    assert two == pytest.approx(bytes_each / 2, rel=0.001)
    # 28 states beside 4 layers with attention are in seven groups of 4.
    few = msgspec.structs.replace(full, state_layers=28, states=28, state_bytes=28 * 4e6)
    blocks = -(-65_536 // 992) + 7 * 2
    assert request_bytes(few, "h100", Layout(), 65_536) == pytest.approx(
        blocks * 992 * 4 * 4_096, rel=0.001
    )


def test_blocks_of_a_latent_beside_states_are_multiples_of_128_tokens() -> None:
    deepseek = msgspec.structs.replace(
        model_named("deepseek-v3"), state_layers=30, states=30, state_bytes=30 * 1e6
    )
    # 31 layers of 1,152 bytes per token; 868 tokens hold a state, so 896 = 7 x 128.
    reserved = deepseek.reserved_tokens(8_960, 1)
    assert reserved == pytest.approx(10 * 896 + 2 * 896, rel=0.001)


def test_a_step_reads_of_a_window_layer_only_the_window() -> None:
    full = model_named("llama-3.1-8b")
    half = msgspec.structs.replace(full, window_layers=16, window=1024)
    assert full.read_tokens(8_192) == 8_192
    assert half.read_tokens(8_192) == (8_192 + 1_024) / 2
    assert half.read_tokens(512) == 512
    # Window layers with twice the scalars weigh twice as much.
    wide = msgspec.structs.replace(half, window_kv_scalars=2 * half.kv_scalars)
    assert wide.kv_token_bytes == 1.5 * full.kv_token_bytes
    assert wide.read_tokens(8_192) == pytest.approx((8_192 + 2 * 1_024) / 3)


def request_bytes(model: Llm, gpu: str, layout: Layout, context: int) -> float:
    check = check_memory(model, gpu_named(gpu), layout, Demand(context, 1))
    return check.free_bytes / check.tokens * context


def test_context_parallel_ranks_divide_the_cache() -> None:
    one = checked("llama-3.1-70b", "h100", Layout(4))
    two = checked("llama-3.1-70b", "h100", Layout(4, cp=2))
    assert two.tokens == pytest.approx(2 * one.tokens, rel=0.001)


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_hold_all_layers_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    counts = layers_of_stages(layers, pp)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert pp == 1 or counts[-1] == min(counts)


@given(st.sampled_from(["llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "deepseek-v3"]), st.data())
def test_the_gpus_together_hold_every_parameter_once(model: str, data: st.DataObject) -> None:
    shape = model_named(model)
    tp, pp = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, 8))
    held = sum(stage.weights_bytes for stage in stages(shape, Layout(tp, pp))) * tp
    assert held == pytest.approx(shape.weights_bytes, rel=1e-6)


@given(st.sampled_from(sorted(GPUS)), st.sampled_from([1, 2, 4, 8]), st.integers(1, 131_072))
def test_a_larger_tp_never_holds_less_and_a_demand_within_the_spare_is_enough(
    gpu: str, tp: int, context: int
) -> None:
    small = checked("llama-3.1-70b", gpu, Layout(tp), Demand(context, 4))
    large = checked("llama-3.1-70b", gpu, Layout(2 * tp), Demand(context, 4))
    assert large.tokens >= small.tokens
    assert small.is_enough == (
        small.verdict is MemoryVerdict.SERVES and small.tokens >= 4 * context * 1.15
    )
