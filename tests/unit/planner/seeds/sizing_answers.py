"""Computes the statements of `penstock seeds` about memory, times, costs and commands."""

from __future__ import annotations

from typing import Any

from mockgpu.paged_kv_cache import BlockPool
from mockgpu.scheduler import Job, Scheduler
from mockgpu.timing.layout_times import step_times_for
from mockgpu.timing.roofline import PROFILES, Roofline, StepWork
from mockgpu.timing.step_time_grids import load_grids, roofline_for, whole_prompt
from planner.golden.cli import report_of
from planner.seeds.collectives import collectives_share
from planner.seeds.statements import SeedItem
from planner.size.replica_times import ReplicaTimes
from policies.golden.answers import GoldenAnswer
from policies.sizing.gpu_memory import Demand, check_memory, kv_capacity_tokens, min_gpus, stages
from policies.sizing.gpus import gpu_named
from policies.sizing.launch_commands import (
    EngineLaunch,
    sglang_command,
    trtllm_options,
    vllm_command,
)
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout, layers_of_stages
from policies.sizing.replica_count import concurrency_of
from policies.sizing.workload_drift import DriftWatch, RequestShape, ShapeCounts
from tests.unit.planner.seeds.answers import Outcome, answer, member, plain, printed

H100, H200, A100 = (gpu_named(name) for name in ("h100", "h200", "a100"))
L8, L70, L70_FP8 = (model_named(f"llama-3.1-{size}") for size in ("8b", "70b", "70b-fp8"))
L405 = model_named("llama-3.1-405b")
GRIDS = load_grids()


def times(layout: Layout, model: str = "llama-3.1-70b", gpu: str = "h100") -> ReplicaTimes:
    return ReplicaTimes(model_named(model), gpu_named(gpu), layout, GRIDS)


def chosen(command: str) -> dict[str, int]:
    layout = plain(command)["plans"][0]["layout"]
    assert isinstance(layout, dict)
    return layout


def points(command: str, **wanted: object) -> list[dict[str, Any]]:
    able = [point for point in plain(command)["front"] if not point["reason"]]
    return [p for p in able if all(p[key] == value for key, value in wanted.items())]


def gain(command: str, low: int, high: int) -> float:
    steps = {step["tp"]: step["expected_s"] for step in plain(command)["ladder"]}
    return float(steps[low] / steps[high])


@answer(1)
def _(_item: SeedItem) -> Outcome:
    line = roofline_for(L70, H100, 8)
    return {"prefill_bound": line.terms(whole_prompt(8192)).bound}


@answer(6)
def _(item: SeedItem) -> Outcome:
    return {"bulk_tp": chosen(item.command.replace(" --tpot 12ms", ""))["tp"]}


@answer(8)
def _(_item: SeedItem) -> Outcome:
    return {f"tokens_tp{tp}": kv_capacity_tokens(L70, H100, tp) for tp in (4, 8)}


@answer(10)
def _(_item: SeedItem) -> Outcome:
    long = 120_000
    return {"ttft_tp8_over_tp4": times(Layout(8), "llama-3.1-70b-fp8").prefill_s(long)
            / times(Layout(4), "llama-3.1-70b-fp8").prefill_s(long)}  # fmt: skip


@answer(11)
def _(_item: SeedItem) -> Outcome:
    pipelines = {pp: times(Layout(8, pp), "llama-3.1-405b") for pp in (2, 4)}
    return {
        f"bubble_share_pp{pp}": each.bubble_s(6000) / each.prefill_s(6000)
        for pp, each in pipelines.items()
    }


@answer(12)
def _(item: SeedItem) -> Outcome:
    return {"pp_of_70b": chosen(item.command.replace("405b", "70b"))["pp"]}


@answer(18)
def _(_item: SeedItem) -> Outcome:
    line = roofline_for(L70, H100, 8)
    decode, prefill = line.terms(StepWork(0, 0.0, 1, 1024)), line.terms(whole_prompt(8192))
    return {
        "collectives_per_compute_decode": decode.collectives_s / decode.flops_s,
        "collectives_per_compute_prefill": prefill.collectives_s / prefill.flops_s,
    }


@answer(19)
def _(item: SeedItem) -> Outcome:
    gains = {tp: gain(item.command, tp, 2 * tp) for tp in (1, 2, 4)}
    return {"gain_tp8_over_tp4": gains[4], "knee": next(tp for tp in gains if gains[tp] < 1.4)}


@answer(20)
def _(item: SeedItem) -> Outcome:
    return {"gain_tp16_over_tp8": gain(item.command, 8, 16)}


@answer(21)
def _(item: SeedItem) -> Outcome:
    front = plain(item.command)["front"]
    return {
        "best_points": sum(point["is_best"] for point in front),
        "refused_tp1": next(p["reason"] for p in front if p["tp"] == 1 and p["reason"]),
    }


@answer(22)
def _(item: SeedItem) -> Outcome:
    best = points(item.command, is_best=True)
    return {
        "fastest_ms": 1e3 * min(point["tpot_s"] for point in best),
        "most_requests_s": max(point["requests_s"] for point in best),
    }


@answer(24)
def _(_item: SeedItem) -> Outcome:
    return {"allreduces": L70.allreduces}


@answer(25)
def _(_item: SeedItem) -> Outcome:
    return {"activation_bytes": L70.activation_bytes}


@answer(26)
def _(_item: SeedItem) -> Outcome:
    return {
        "nvlink_gb_s": H100.link_bytes_s / 1e9,
        "pcie_gb_s": gpu_named("l40s").link_bytes_s / 1e9,
        "nic_gb_s": H100.nic_bytes_s / 1e9,
    }


@answer(28)
def _(item: SeedItem) -> Outcome:
    steps = {step["tp"]: step["intensity"] for step in plain(item.command)["ladder"]}
    return {"intensity_tp1": steps[1], "intensity_tp8": steps[8]}


@answer(29)
def _(_item: SeedItem) -> Outcome:
    parts = [stage.kv_token_bytes for stage in stages(L405, Layout(8, 4))]
    one, two = (times(Layout(8, pp), "llama-3.1-405b") for pp in (1, 2))
    return {
        "kv_share_of_a_stage_pp4": max(parts) / sum(parts),
        "batch_pp2_over_pp1_at_equal_steps": 2 * one.decode_s(16, 4096) / two.decode_s(32, 4096),
    }


@answer(30)
def _(_item: SeedItem) -> Outcome:
    layout = Layout(8, 4)
    check = check_memory(L405, H100, layout, Demand(8192))
    return {
        "weights_gb": L405.weights_bytes / layout.gpus / 1e9,
        "gpus": layout.gpus,
        "tokens": check.tokens,
        "layers_of_stages": str(layers_of_stages(L405.layers, 4)),
    }


@answer(31)
def _(_item: SeedItem) -> Outcome:
    return {"bytes_405b": L405.activation_bytes, "bytes_70b": L70.activation_bytes}


@answer(34)
def _(item: SeedItem) -> Outcome:
    wanted = {"model": L70_FP8.name, "tp": 4, "batch": 16, "pp": 1}
    (many,) = points(item.command, **wanted)
    (few,) = points(item.command.replace("--gpus 16", "--gpus 8"), **wanted)
    return {
        "requests_s_16_over_8_gpus": many["requests_s"] / few["requests_s"],
        "tpot_16_over_8_gpus": many["tpot_s"] / few["tpot_s"],
    }


def _least(_item: SeedItem) -> Outcome:
    return {
        "least_70b": min_gpus(L70, H100),
        "least_70b_fp8": min_gpus(L70_FP8, H100),
        "least_405b": min_gpus(L405, H100),
    }


answer(38)(_least)
answer(45)(_least)


def _emitted(item: SeedItem) -> Outcome:
    return {"emitted": printed(item.command)}


for _number in (41, 106):
    answer(_number)(_emitted)


@answer(42)
def _(item: SeedItem) -> Outcome:
    layout = chosen(item.command)
    return {
        "replicas_on_a_node": 8 // layout["tp"],
        "activation_bytes": L70.activation_bytes,
        "wire_ns": 1e9 * L70.activation_bytes / (2 * H100.link_bytes_s),
    }


@answer(43)
def _(item: SeedItem) -> Outcome:
    cold = item.command.replace(" --cached 0.4", "")
    shared, whole = (plain(command)["plans"][0]["single"] for command in (item.command, cold))
    return {"prefill_40_percent_cached_over_none": shared["ttft_s"] / whole["ttft_s"]}


@answer(44)
def _(_item: SeedItem) -> Outcome:
    return {"concurrency_of_10_for_12s": concurrency_of(10, 12)}


@answer(49)
def _(item: SeedItem) -> Outcome:
    short = item.command.replace("--in 6000", "--in 200").replace("--out 200", "--out 2000")
    short = short.replace("--concurrency 24", "--concurrency 96")
    return {"short_prompts": str(member(short, "gates.8.answer"))}


@answer(50)
def _(_item: SeedItem) -> Outcome:
    return {"kv_token_bytes": L70.kv_token_bytes}


@answer(63)
def _(item: SeedItem) -> Outcome:
    wanted = {"model": L70_FP8.name, "batch": 16, "pp": 1}
    (four,), (eight,) = (points(item.command, tp=tp, **wanted) for tp in (4, 8))
    (few,) = points(item.command.replace("--gpus 16", "--gpus 8"), tp=4, **wanted)
    return {
        "usd_16_over_8_gpus": four["usd_million"] / few["usd_million"],
        "usd_tp8_over_tp4": eight["usd_million"] / four["usd_million"],
    }


@answer(64)
def _(item: SeedItem) -> Outcome:
    return {
        "headline_70b": printed(item.command),
        "headline_8b": printed(item.command.replace("70b", "8b")),
    }


@answer(65)
def _(_item: SeedItem) -> Outcome:
    harbor = PROFILES["harbor"]
    work = StepWork(0, 0.0, 1, 1024)
    fp8 = roofline_for(L70_FP8, A100, 4, harbor)
    return {
        "tp8_bf16_ms": 1e3 * roofline_for(L70, A100, 8, harbor).step_s(work),
        "tp4_fp8_ms": 1e3 * fp8.step_s(work),
        "is_ttft_below_1200_ms": fp8.step_s(whole_prompt(6000)) < 1.2,
    }


@answer(68)
def _(item: SeedItem) -> Outcome:
    many = plain(item.command)["ladder"][3]["parts"]["collectives_s"] / 32
    one = plain(item.command.replace("--ladder 32", "--ladder 1"))
    return {"collectives_per_token_batch32_over_1": many
            / one["ladder"][3]["parts"]["collectives_s"]}  # fmt: skip


@answer(69)
def _(_item: SeedItem) -> Outcome:
    return {
        "ms_fp8_tp2": 1e3 * times(Layout(2), "llama-3.1-70b-fp8").decode_s(1, 4096),
        "ms_bf16_tp4": 1e3 * times(Layout(4)).decode_s(1, 4096),
    }


@answer(70)
def _(_item: SeedItem) -> Outcome:
    launch = EngineLaunch(
        "meta-llama/Llama-3.1-70B-Instruct", Layout(4), dtype="bfloat16", max_model_len=8192
    )
    return {"emitted": vllm_command(launch, is_module=True)}


@answer(72)
def _(_item: SeedItem) -> Outcome:
    engine = Scheduler(BlockPool(2000), 8, 8192)
    engine.add(Job(20_000, 1))
    steps = 0
    while (plan := engine.step()) is not None:
        steps += bool(plan.chunks)
        engine.finish(plan)
    return {"steps_of_a_20k_prompt": steps}


@answer(74)
def _(_item: SeedItem) -> Outcome:
    return {
        f"share_{name}_tp{tp}_batch{batch}": collectives_share(model, H100, tp, batch, 4096)
        for name, model, tp, batch in (("8b", L8, 8, 1), ("8b", L8, 2, 1), ("70b", L70, 8, 1))
    }


@answer(77)
def _(item: SeedItem) -> Outcome:
    size = "penstock size"
    usual = "--in 2000 --out 200 --context 4k --concurrency"
    large = plain(f"{size} llama-3.1-70b {usual} 8")["plans"][0]
    offline = plain(f"{size} llama-3.1-70b --gpu h200 {usual} 256")["plans"][0]
    many = plain(item.command)["plans"][0]
    return {
        "too_large_for_one": f"{large['model']['weight_bytes']:g} byte, TP {large['layout']['tp']}",
        "fits_one": f"TP {chosen(f'{size} llama-2-13b {usual} 64')['tp']}",
        "interactive": f"TP {chosen(f'{size} llama-3.1-8b --gpu l40s {usual} 4')['tp']}",
        "offline": f"TP {offline['layout']['tp']}, batch {offline['ceiling']}",
        "multi_tenant": f"{many['replicas']} x TP {many['layout']['tp']}, cap {many['ceiling']}",
        "copied_from_training": " ".join(
            check_memory(L70, H100, Layout(1, 1, dp=8), Demand(8192)).text.split()
        ),
    }


@answer(78)
def _(_item: SeedItem) -> Outcome:
    l40s = gpu_named("l40s")
    pcie, nvlink = (
        Roofline(L70_FP8, gpu, 4, PROFILES["2026"]).terms(StepWork(0, 0.0, 8, 8 * 4096))
        for gpu in (l40s, H100)
    )
    return {"collectives_pcie_over_nvlink": pcie.collectives_s / nvlink.collectives_s}


@answer(83)
def _(item: SeedItem) -> Outcome:
    return {"tokens_s_tp4_over_tp2": gain(item.command, 2, 4)}


@answer(93)
def _(_item: SeedItem) -> Outcome:
    # Compare 100 answers: equal ones, and ones of which every fifth ends otherwise.
    prompts: list[dict[str, Any]] = [{"prompt": str(n)} for n in range(100)]
    base = [GoldenAnswer("one two") for _ in prompts]
    noisy = [GoldenAnswer("one too" if n % 5 == 0 else "one two") for n in range(100)]
    return {
        "equal_engine": report_of(prompts, base, base, base, 0.0).is_worse,
        "weights_with_noise": report_of(prompts, base, noisy, base, 0.0).is_worse,
    }


@answer(97)
def _(item: SeedItem) -> Outcome:
    members = plain(item.command)
    return {"cost_share": members["against"]["usd_hour"] / members["plans"][0]["usd_hour"]}


@answer(99)
def _(_item: SeedItem) -> Outcome:
    one = times(Layout(1), "llama-3.1-8b").decode_s(8, 4096)
    data = times(Layout(1, dp=2), "llama-3.1-8b").decode_s(16, 4096)
    pipe = times(Layout(1, 2), "llama-3.1-8b").decode_s(16, 4096)
    experts = times(Layout(8, ep=8), "deepseek-v3", "h200").decode_s(8, 4096)
    return {
        "tp_collectives": L8.allreduces,
        "pp_us": 1e6 * (pipe - one),
        "ep_us": 1e6 * (experts - times(Layout(8), "deepseek-v3", "h200").decode_s(8, 4096)),
        "dp_us": 1e6 * (data - one),
    }


@answer(100)
def _(_item: SeedItem) -> Outcome:
    decode, prefill = (
        [ask(times(Layout(4, cp=cp))) for cp in (4, 1)]
        for ask in (lambda t: t.decode_s(1, 120_000), lambda t: t.prefill_s(120_000))
    )
    return {
        "decode_cp4_over_cp1": decode[0] / decode[1],
        "prefill_cp4_over_cp1": prefill[0] / prefill[1],
    }


@answer(107)
def _(item: SeedItem) -> Outcome:
    launch = EngineLaunch("deepseek-ai/DeepSeek-V3", Layout(1, ep=8, dp=8), has_eplb=True)
    return {"emitted": printed(item.command), "with_eplb": sglang_command(launch)}


@answer(113)
def _(_item: SeedItem) -> Outcome:
    work = StepWork(0, 0.0, 512, 512 * 4096)
    layout = Layout(1, ep=8, dp=8)
    even, skewed = (
        1e3 * step_times_for(model_named("deepseek-v3"), H200, layout, skew=skew).step_s(work)
        for skew in (1.0, 1.5)
    )
    return {"decode_ms_even": even, "decode_ms_skewed": skewed}


@answer(114)
def _(_item: SeedItem) -> Outcome:
    # The profiles of the mock: what one layer costs in a step, and what a token costs at batch 1.
    work, outcome = StepWork(0, 0.0, 1, 1024), dict[str, object]()
    for name in ("2023", "2026"):
        line = Roofline(L70, H100, 8, PROFILES[name])
        outcome[f"layer_us_{name}"] = 1e6 * line.terms(work).overhead_s / L70.layers
        outcome[f"decode_ms_{name}"] = 1e3 * line.equation_s(work)
    return outcome


@answer(118)
def _(_item: SeedItem) -> Outcome:
    chat, agent = RequestShape(1000, 200, 0.6, 2), RequestShape(20_000, 60, 0.05, 40)
    counts = ShapeCounts()
    counts.add(chat)
    alarms = {}
    for name, shape, spacing_s in (("to_agents", agent, 2.0), ("of_doubled_rate", chat, 1.0)):
        watch = DriftWatch(counts.shares(), [0.5] * 24)
        times = range(int(1801 / spacing_s))
        windows = [each for n in times for each in watch.add(n * spacing_s, shape)]
        alarms[f"drift_{name}"] = any(window.is_alarm for window in windows)
    return alarms


def trtllm_of_the_seed() -> str:
    # Return TensorRT-LLM's options for TP 8 with experts divided 4 x 2.
    return trtllm_options(EngineLaunch("m", Layout(8, ep=2), moe_tp=4))
