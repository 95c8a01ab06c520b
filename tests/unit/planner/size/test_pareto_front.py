"""Tests of the best trade-offs (Pareto front) of layouts for 16 GPUs."""

from __future__ import annotations

import pytest

from mockgpu.timing.step_time_grids import load_grids
from planner.size.pareto_front import FleetPoint, best_of, fleet_points, headline, tp_ladder
from planner.size.plan_draft import PlanHardware
from planner.size.recipe import variants
from planner.size.replica_times import ReplicaTimes, at_batch, largest_batch
from planner.size.workload import Promise, Workload
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import Llm, model_named
from policies.sizing.parallel_layout import Layout

GRIDS = load_grids()
H100 = PlanHardware(gpu_named("h100"), 8, 16, 2.5)
WORK = Workload(6000, 200, 8192, concurrency=16.0, promises=(Promise(tpot_s=0.04),))


@pytest.fixture(scope="module")
def points() -> list[FleetPoint]:
    return fleet_points(variants(model_named("llama-3.1-70b"), "auto"), H100, WORK, GRIDS)


@pytest.mark.parametrize(
    ("tp", "batch", "ms", "requests_s"),
    [(8, 1, 7.6, 1.16), (4, 4, 15.3, 4.76), (4, 16, 35.5, 8.67), (2, 16, 56.7, 10.84),
     (2, 32, 99.7, 12.57)],
)  # fmt: skip
def test_the_front_of_16_h100_goes_through_the_reference_points(
    points: list[FleetPoint], tp: int, batch: int, ms: float, requests_s: float
) -> None:
    (point,) = (
        point for point in points if point.is_best and (point.tp, point.batch) == (tp, batch)
    )
    assert point.replicas == 16 // tp
    assert point.tpot_s == pytest.approx(ms / 1e3, rel=0.01)
    assert point.requests_s == pytest.approx(requests_s, rel=0.01)


def test_no_bf16_point_is_on_the_front_and_tp_falls_along_it(points: list[FleetPoint]) -> None:
    best = sorted((point for point in points if point.is_best), key=lambda point: point.tpot_s)
    assert all("FP8" in point.model for point in best)
    assert [point.tp for point in best] == sorted((point.tp for point in best), reverse=True)
    last_8 = max(point.tpot_s for point in best if point.tp == 8)
    last_4 = max(point.tpot_s for point in best if point.tp == 4)
    assert last_8 < 0.013 < 0.0153 <= last_4 < 0.053 < 0.0567


def test_what_cannot_be_has_a_reason_and_is_never_best(points: list[FleetPoint]) -> None:
    impossible = {(p.model[-3:], p.tp, p.pp, p.batch): p.reason for p in points if p.reason}
    assert impossible["uct", 1, 1, 1] == "does not load"
    assert impossible["uct", 2, 1, 1] == "loads, but serves no request of 6,200 tokens"
    assert impossible["FP8", 2, 1, 64] == "the KV cache holds 32 requests"
    assert "TP alone" in impossible["FP8", 4, 2, 1]
    assert not [point for point in points if point.reason and point.is_best]


def test_no_point_beats_a_best_one(points: list[FleetPoint]) -> None:
    able = [point for point in points if not point.reason]
    for best in best_of(able):
        assert not [
            point
            for point in able
            if (point.tpot_s < best.tpot_s and point.requests_s >= best.requests_s)
            or (point.tpot_s <= best.tpot_s and point.requests_s > best.requests_s)
        ]


def test_the_headline_flips_with_the_model_and_the_promise(points: list[FleetPoint]) -> None:
    small = fleet_points([model_named("llama-3.1-8b")], H100, WORK, GRIDS)
    assert headline(small, Workload(6000, 200, 8192)).startswith("the model fits one GPU")
    text = headline(points, WORK)
    assert text.startswith("the model needs 2 GPUs to fit; TP 4 at batch 16 for the 40.0 ms")
    assert "45% more" in text
    none = Workload(6000, 200, 8192, promises=(Promise(tpot_s=0.001),))
    assert "no layout keeps 1.0 ms" in headline(points, none)
    assert headline([], WORK) == "no layout of these GPUs holds the model"


@pytest.mark.parametrize(
    ("model", "batch", "speeds", "taxes"),
    [
        ("llama-3.1-70b-fp8", 16, (427, 349, 224), (0.0, -0.18, -0.48)),
        ("llama-3.1-70b-fp8", 64, (None, 980, 683), (None, 0.0, -0.30)),
        ("llama-3.1-70b", 64, (None, 663, 519), (None, 0.0, -0.22)),
    ],
)
def test_the_tp_tax_at_4k_of_context(
    model: str, batch: int, speeds: tuple[float | None, ...], taxes: tuple[float | None, ...]
) -> None:
    steps = {step.tp: step for step in tp_ladder(model_named(model), H100, batch, 4096, GRIDS)}
    for tp, speed, tax in zip((2, 4, 8), speeds, taxes, strict=True):
        if speed is None:
            assert steps[tp].tax is None, "what holds no such batch is never quoted"
            continue
        assert steps[tp].tokens_s_gpu == pytest.approx(speed, rel=0.01)
        assert steps[tp].tax == pytest.approx(tax, abs=0.005)


def test_the_price_of_the_ladder_is_that_of_its_speed() -> None:
    steps = {s.tp: s for s in tp_ladder(model_named("llama-3.1-70b-fp8"), H100, 16, 4096, GRIDS)}
    assert [steps[tp].usd_million for tp in (2, 4, 8)] == pytest.approx(
        (1.63, 1.99, 3.10), abs=0.01
    )


def test_the_ladder_has_ideal_and_expected_side_by_side_and_what_limits_a_step() -> None:
    steps = {
        step.tp: step for step in tp_ladder(model_named("llama-3.1-70b"), H100, 1, 4096, GRIDS)
    }
    assert steps[8].ideal_s == pytest.approx(5.2e-3, rel=0.02)
    assert steps[8].expected_s == pytest.approx(10.3e-3, rel=0.01)
    assert [steps[tp].expected_s * 1e3 for tp in (1, 2, 4)] == pytest.approx(
        (52.6, 27.7, 15.1), rel=0.01
    )
    assert steps[1].parts.bound == "weights"
    assert steps[16].problem.startswith("crosses link domains")


def times(model: Llm, layout: Layout, gpu: str = "h100") -> ReplicaTimes:
    return ReplicaTimes(model, gpu_named(gpu), layout, GRIDS)


def test_a_pipeline_adds_hops_to_a_token_and_doubles_the_requests() -> None:
    model = model_named("llama-3.1-405b")
    one, two = times(model, Layout(8)), times(model, Layout(8, 2))
    assert two.decode_s(32, 4096) - one.decode_s(16, 4096) == pytest.approx(20.5e-6, rel=0.01)
    alone, both = at_batch(one, WORK, 16), at_batch(two, WORK, 32)
    assert both.requests_s == pytest.approx(2 * alone.requests_s, rel=0.01)
    assert both.ttft_s == pytest.approx(alone.ttft_s, rel=0.01)
    assert two.bubble_s(6000) == pytest.approx(both.ttft_s / 2)


def test_experts_over_more_ranks_read_less_and_travel() -> None:
    model = model_named("deepseek-v3")
    tp, ep = times(model, Layout(8), "h200"), times(model, Layout(1, ep=8, dp=8), "h200")
    assert ep.decode_s(512, 4096) > times(model, Layout(8, ep=8), "h200").decode_s(1, 4096)
    assert ep.prefill_s(6000) > tp.prefill_s(6000), "one rank of eight computes a prompt"


def test_the_largest_batch_keeps_the_promise_and_one_more_does_not() -> None:
    replica = times(model_named("llama-3.1-70b-fp8"), Layout(4))
    batch = largest_batch(replica, WORK, 64, 0.04)
    assert at_batch(replica, WORK, batch).tpot_s <= 0.04 < at_batch(replica, WORK, batch + 1).tpot_s
    assert largest_batch(replica, WORK, 8, 0.04) == 8
    assert largest_batch(replica, WORK, 64, 0.001) == 0
    assert largest_batch(replica, WORK, 64, None) == 64


def test_context_parallel_ranks_divide_a_prefill() -> None:
    model = model_named("llama-3.1-70b")
    one, two = times(model, Layout(4)), times(model, Layout(4, cp=2))
    assert two.prefill_s(100_000) == pytest.approx(one.prefill_s(100_000) / 2)
