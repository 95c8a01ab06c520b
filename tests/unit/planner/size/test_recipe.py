"""Tests of how `penstock size` chooses a layout, step by step, for published workloads."""

from __future__ import annotations

import msgspec
import pytest

from mockgpu.timing.step_time_grids import load_grids
from planner.size.plan_draft import FleetPlan, PlanHardware, SizingError
from planner.size.recipe import plan_fleet, variants
from planner.size.workload import Promise, Workload
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout

GRIDS = load_grids()
HARBOR = Workload(
    6000, 200, 8192, concurrency=24.0, max_concurrency=24, promises=(Promise("chat", 1.2, 0.04),)
)


def planned(
    model: str,
    work: Workload,
    gpu: str = "h100",
    gpus: int | None = None,
    quant: str = "auto",
    is_best_effort: bool = False,
    domain: int | None = None,
) -> FleetPlan:
    card = gpu_named(gpu)
    hardware = PlanHardware(card, domain or card.domain_gpus, gpus, 2.5, is_best_effort)
    return plan_fleet(variants(model_named(model), quant), hardware, work, GRIDS)


def answer(plan: FleetPlan, number: int) -> str:
    (gate,) = (gate for gate in plan.gates if gate.number == number)
    return gate.answer


def test_the_gates_come_in_order_and_each_names_its_seed() -> None:
    plan = planned("llama-3.1-70b", HARBOR)
    assert [gate.number for gate in plan.gates] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert all("seed" in gate.source and gate.question and gate.answer for gate in plan.gates)


def test_harbor_gets_fp8_at_tp_4_and_the_gate_shows_that_tp_2_has_1_1_percent() -> None:
    plan = planned("llama-3.1-70b", HARBOR)
    assert (plan.model.weight_bytes, plan.layout) == (1.0, Layout(4))
    (least,) = (gate for gate in plan.gates if gate.number == 3)
    assert any("TP 2" in line and "has 1.1%" in line for line in least.numbers)
    assert plan.single.step_s <= 0.04
    assert plan.single.ttft_s + plan.wait_s <= 1.2


def test_the_figures_of_the_page_on_sizing() -> None:
    promises = (Promise("standard", 1.2, 0.038),)
    work = Workload(6000, 200, 8192, rate_s=4.0, max_concurrency=24, promises=promises)
    plan, bf16 = planned("llama-3.1-70b", work), planned("llama-3.1-70b", work, quant="bf16")
    assert (plan.gpus, plan.replicas, plan.ceiling, plan.layout) == (12, 3, 17, Layout(4))
    assert bf16.gpus == 16
    assert plan.shortfalls == ()


def test_120_requests_at_once_over_24_per_replica_are_five_replicas() -> None:
    work = Workload(6000, 200, 8192, concurrency=120.0, max_concurrency=24)
    plan = planned("llama-3.1-70b", work, quant="fp8")
    assert (plan.ceiling, plan.replicas) == (24, 5)


def test_a_rate_becomes_requests_at_once_by_the_time_that_each_takes() -> None:
    work = Workload(6000, 200, 8192, rate_s=5.0, max_concurrency=24)
    plan = planned("llama-3.1-70b", work, quant="fp8")
    request_s = plan.ceiling / plan.loaded.requests_s
    assert plan.replicas == -(-5.0 * request_s // plan.ceiling)
    assert plan.replicas * plan.loaded.requests_s >= 5.0


@pytest.mark.parametrize(
    ("model", "work", "layout"),
    [
        # Published decision tables: chat, bulk, retrieval over long contexts, experts, one GPU.
        ("llama-3.1-70b", Workload(2000, 200, 4096, concurrency=8.0,
                                   promises=(Promise(tpot_s=0.012),)), Layout(8)),
        ("llama-3.1-70b", Workload(2000, 200, 4096, concurrency=8.0), Layout(4)),
        ("llama-3.1-70b", Workload(30_000, 200, 32_768, concurrency=2.0,
                                   promises=(Promise(ttft_s=1.5),)), Layout(8)),
        ("llama-3.1-8b", Workload(2000, 200, 4096, concurrency=8.0), Layout(1)),
    ],
)  # fmt: skip
def test_a_decision_table_follows_from_the_numbers_of_the_workload(
    model: str, work: Workload, layout: Layout
) -> None:
    assert planned(model, work, quant="bf16").layout == layout


def test_a_node_of_8_gpus_holds_two_replicas_of_70b_for_100_ms() -> None:
    # The source is a published exercise. Its text says "four TP 4 replicas per node", but eight
    # GPUs hold two.
    work = Workload(2000, 200, 4096, concurrency=8.0, promises=(Promise(tpot_s=0.1),))
    plan = planned("llama-3.1-70b", work, gpus=8, quant="bf16")
    assert 8 // plan.layout.gpus == 2
    assert plan.single.step_s < 0.1
    assert plan.shortfalls == ()


@pytest.mark.parametrize(
    ("model", "gpu", "work", "layout", "weight_bytes"),
    [
        # Scenarios of a published table: too large for one GPU, and close to fitting.
        ("llama-3.1-70b", "h100", Workload(2000, 200, 4096, concurrency=8.0), Layout(2), 1.0),
        # A model that fits one GPU, for throughput.
        ("llama-2-13b", "h100", Workload(2000, 200, 4096, concurrency=64.0), Layout(1), 1.0),
        # Interactive, batch 1 to 4: the lowest TP that fits, here over PCIe.
        ("llama-3.1-8b", "l40s", Workload(2000, 200, 4096, concurrency=4.0), Layout(1), 2.0),
        # Offline batches: moderate TP and large batches; fp8 at TP 1 saves no GPU here.
        ("llama-3.1-70b", "h200", Workload(2000, 200, 4096, concurrency=256.0), Layout(2), 2.0),
    ],
)
def test_scenarios_are_answered_from_their_numbers(
    model: str, gpu: str, work: Workload, layout: Layout, weight_bytes: float
) -> None:
    plan = planned(model, work, gpu)
    assert (plan.layout, plan.model.weight_bytes) == (layout, weight_bytes)
    assert plan.replicas * plan.ceiling >= (work.concurrency or 0)


def test_experts_of_an_mla_model_are_spread_with_attention_at_tp_1() -> None:
    plan = planned("deepseek-v3", Workload(2000, 200, 4096, concurrency=64.0), "h200")
    assert plan.layout == Layout(1, ep=8, dp=8)
    assert "8" in answer(plan, 6)


def test_a_dense_model_and_a_single_gpu_get_no_experts_spread() -> None:
    assert "dense" in answer(planned("llama-3.1-8b", HARBOR), 6)


def test_405b_in_bf16_gets_two_stages_and_in_fp8_none() -> None:
    work = Workload(6000, 200, 8192, concurrency=8.0)
    bf16, fp8 = (planned("llama-3.1-405b", work, quant=quant) for quant in ("bf16", "fp8"))
    assert (bf16.layout, fp8.layout) == (Layout(8, 2), Layout(8))
    (stages,) = (gate for gate in bf16.gates if gate.number == 5)
    assert any("TP 16 on the same GPUs would hold 265,343" in note for note in stages.notes)
    (least,) = (gate for gate in bf16.gates if gate.number == 3)
    assert any("11 GPUs" in note and "128 attention heads" in note for note in least.notes)
    auto = planned("llama-3.1-405b", work)
    assert auto.model.weight_bytes == 1.0
    assert "yes: 8 GPUs instead of 16" in answer(auto, 1)


def test_an_unreachable_promise_buys_no_gpu() -> None:
    free = planned("llama-3.1-70b", Workload(6000, 200, 8192, concurrency=48.0))
    promise = (Promise(tpot_s=0.001),)
    tight = planned("llama-3.1-70b", Workload(6000, 200, 8192, concurrency=48.0, promises=promise))
    assert (tight.layout, tight.gpus) == (free.layout, free.gpus)
    assert "unreachable" in answer(tight, 4)
    assert "knee is TP" in answer(tight, 4)
    (shortfall,) = tight.shortfalls
    assert "misses TPOT by" in shortfall
    assert "at batch 1:" in shortfall


def test_best_effort_goes_to_the_knee() -> None:
    work = Workload(6000, 200, 8192, concurrency=48.0, promises=(Promise(tpot_s=0.0001),))
    plan = planned("llama-3.1-8b", work, quant="bf16", is_best_effort=True)
    # The 8B model is 1.54 and 1.47 times as fast with each doubling up to TP 4, but only 1.28 times
    # from TP 4 to TP 8.
    assert plan.layout == Layout(4)
    assert plan.shortfalls


def test_a_promise_that_more_tp_keeps_is_bought_and_no_more() -> None:
    work = Workload(6000, 200, 8192, concurrency=4.0, promises=(Promise(tpot_s=0.0125),))
    assert planned("llama-3.1-70b", work, quant="fp8").layout == Layout(4)


def test_the_tightest_class_decides() -> None:
    classes = (Promise("batch", 60.0, 0.5), Promise("chat", 1.2, 0.009, 99.0))
    work = Workload(6000, 200, 8192, concurrency=4.0, promises=classes)
    assert planned("llama-3.1-70b", work, quant="fp8").layout == Layout(8)
    assert work.percentile == 99.0


def test_waits_are_bought_up_to_twice_the_load_only() -> None:
    work = Workload(6000, 200, 8192, rate_s=3.0, promises=(Promise(ttft_s=0.32),))
    plan = planned("llama-3.1-70b", work, quant="fp8")
    assert any("not bought" in text for text in plan.shortfalls)
    bare = planned("llama-3.1-70b", msgspec.structs.replace(work, promises=()), quant="fp8")
    assert plan.replicas <= 2 * bare.replicas


def test_too_few_gpus_are_a_shortfall_with_the_rate_that_they_carry() -> None:
    work = Workload(6000, 200, 8192, concurrency=480.0, max_concurrency=24)
    plan = planned("llama-3.1-70b", work, gpus=16)
    assert any("there are 16" in text and "requests/s" in text for text in plan.shortfalls)


def test_too_few_gpus_for_one_replica_are_refused_with_what_is_valid() -> None:
    work = Workload(6000, 200, 8192, concurrency=8.0)
    with pytest.raises(SizingError, match=r"give --gpus 16 or more"):
        planned("llama-3.1-405b", work, gpus=8, quant="bf16")


def test_long_prompts_that_miss_their_ttft_get_context_parallelism() -> None:
    promise = (Promise(ttft_s=5.0),)
    work = Workload(120_000, 200, 131_072, concurrency=1.0, promises=promise)
    plan = planned("llama-3.1-70b", work, quant="fp8")
    assert plan.layout.cp > 1
    assert plan.single.ttft_s <= 5.0
    assert plan.shortfalls == ()
    never = msgspec.structs.replace(work, promises=(Promise(ttft_s=0.01),))
    assert planned("llama-3.1-70b", never, quant="fp8").layout.cp == 1
    short = planned("llama-3.1-70b", HARBOR)
    assert "short" in answer(short, 7)


def test_a_cached_share_shortens_the_prefill_and_needs_no_more_gpus() -> None:
    cold = planned("llama-3.1-70b", HARBOR)
    warm = planned("llama-3.1-70b", msgspec.structs.replace(HARBOR, cached_share=0.5))
    assert warm.single.ttft_s < cold.single.ttft_s
    assert warm.gpus <= cold.gpus
    assert warm.prices.cached is not None


def test_prices_of_all_tokens_are_what_the_busy_engine_costs() -> None:
    plan = planned("llama-3.1-70b", msgspec.structs.replace(HARBOR, cached_share=0.4))
    prices, work = plan.prices, plan.work
    per_request = (
        (prices.prompt or 0) * work.uncached
        + (prices.cached or 0) * work.cached
        + (prices.answer or 0) * work.output
    ) / 1e6
    hour = per_request * plan.loaded.requests_s * 3600
    assert hour == pytest.approx(2.5 * plan.layout.gpus, rel=0.01)


def test_seed_and_rule_agree_that_a_plan_has_no_errors() -> None:
    for model in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "deepseek-v3"):
        plan = planned(model, Workload(2000, 200, 4096, concurrency=8.0), "h200")
        assert not [finding for finding in plan.findings if finding.is_error]
