"""Compares all layouts of a number of GPUs by speed and cost, and marks the best ones.

A layout is among the best if no other one is better in both time per token and throughput (the
Pareto front). A point is (weights, TP, PP, replicas, batch). Its times are the static estimate of
replica_times.py. Only a replay shows attainment under real arrivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from mockgpu.timing.roofline import StepTimeParts
from mockgpu.timing.step_time_grids import Grid
from planner.size.plan_draft import PlanHardware
from planner.size.replica_times import ReplicaTimes, at_batch
from planner.size.units import ms
from planner.size.workload import Workload
from policies.sizing.arithmetic_intensity import matrix_intensity
from policies.sizing.gpu_memory import Demand, MemoryCheck, MemoryVerdict, check_memory
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import Llm
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import heads_problem, valid_tp_sizes
from policies.sizing.token_cost import tp_tax, usd_per_million

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_LADDER_TP = 16


class FleetPoint(msgspec.Struct, frozen=True):
    """One way to use a fleet's GPUs: a layout and a batch size, with its speed and cost.

    model         name of the model
    gpu           GPU type
    tp            tensor-parallel size
    pp            pipeline-parallel size
    ep            expert-parallel size
    replicas      number of replicas
    batch         number of requests per replica at a time
    ttft_s        seconds to the first token
    tpot_s        seconds per further token
    requests_s    requests per second of the fleet
    tokens_s_gpu  answer tokens per second and GPU
    usd_million   dollars per million answer tokens, including the cost of prompts
    kv_use        share of the KV cache that the batch fills, 0 to 1
    reason        why the layout is impossible; empty: it is possible
    is_best       whether every other point is slower or serves fewer requests
    """

    model: str
    gpu: str
    tp: int
    pp: int
    replicas: int
    batch: int
    ttft_s: float
    tpot_s: float
    requests_s: float
    tokens_s_gpu: float
    usd_million: float
    kv_use: float
    reason: str = ""
    is_best: bool = False
    ep: int = 1


def fleet_points(
    models: Sequence[Llm], hardware: PlanHardware, work: Workload, grids: Sequence[Grid]
) -> list[FleetPoint]:
    """Return every layout and batch size for the GPUs of `hardware`, with the best points
    marked.
    """
    gpus = hardware.gpus or hardware.domain
    points = [
        point
        for model in models
        for layout, needless in _layouts(model, hardware, gpus, work)
        for point in _points(model, hardware, layout, work, grids, needless)
    ]
    best = {id(point) for point in best_of([point for point in points if not point.reason])}
    return [
        msgspec.structs.replace(point, is_best=True) if id(point) in best else point
        for point in points
    ]


def best_of(points: Sequence[FleetPoint]) -> list[FleetPoint]:
    """Return the points that no other one beats in both time per token and requests per second."""
    best: list[FleetPoint] = []
    for point in sorted(points, key=lambda point: (point.tpot_s, -point.requests_s)):
        if not best or point.requests_s > best[-1].requests_s:
            best.append(point)
    return best


NEEDLESS_PP = "no PP where TP alone holds the model: stages add latency and bubbles (seed 004)"


def _layouts(
    model: Llm, hardware: PlanHardware, gpus: int, work: Workload
) -> Iterator[tuple[Layout, str]]:
    # Yield (layout, reason why it is not needed) for a number of GPUs; the reason may be empty.
    sizes = valid_tp_sizes(facts_of(model), min(hardware.domain, gpus))
    demand = Demand(work.prompt + work.output)
    alone = any(check_memory(model, hardware.gpu, Layout(tp), demand).served for tp in sizes)
    for tp in sizes:
        pp = 1
        while tp * pp <= gpus and pp <= model.layers:
            ep = tp if model.experts and model.experts % tp == 0 else 1
            yield Layout(tp, pp, ep=ep), NEEDLESS_PP if alone and pp > 1 else ""
            pp *= 2


def _points(
    model: Llm,
    hardware: PlanHardware,
    layout: Layout,
    work: Workload,
    grids: Sequence[Grid],
    needless: str,
) -> Iterator[FleetPoint]:
    replicas = (hardware.gpus or hardware.domain) // layout.gpus
    tokens = work.prompt + work.output
    memory = check_memory(model, hardware.gpu, layout, Demand(tokens))
    times = ReplicaTimes(model, hardware.gpu, layout, grids)
    for batch in BATCHES:
        loaded = at_batch(times, work, batch)
        speed = loaded.tokens_s * replicas
        yield FleetPoint(
            *(model.name, hardware.gpu.name, layout.tp, layout.pp, replicas, batch),
            *(loaded.ttft_s, loaded.tpot_s, loaded.requests_s * replicas),
            speed / (replicas * layout.gpus),
            usd_per_million(hardware.price_hour, layout.gpus * replicas, speed),
            batch * tokens / memory.tokens if memory.tokens else 0.0,
            _reason(memory, batch) or needless,
            ep=layout.ep,
        )


def _reason(memory: MemoryCheck, batch: int) -> str:
    if memory.verdict is not MemoryVerdict.SERVES:
        return memory.text
    if memory.served < batch:
        return f"the KV cache holds {memory.served} requests"
    return ""


def headline(points: Sequence[FleetPoint], work: Workload) -> str:
    """Return the main result of a sizing in one sentence: more replicas or more TP, and why."""
    feasible = [point for point in points if not point.reason]
    if not feasible:
        return "no layout of these GPUs holds the model"
    least = min(point.tp * point.pp for point in feasible)
    cheapest = min(feasible, key=lambda point: point.usd_million)
    fit = (
        "the model fits one GPU: replication is cheapest"
        if least == 1
        else f"the model needs {least} GPUs to fit"
    )
    if work.tpot_s is None or cheapest.tpot_s <= work.tpot_s:
        return fit
    fast = [point for point in feasible if point.tpot_s <= work.tpot_s]
    if not fast:
        return f"{fit}; no layout keeps {ms(work.tpot_s)} per token"
    choice = min(fast, key=lambda point: point.usd_million)
    more = choice.usd_million / cheapest.usd_million - 1
    return (
        f"{fit}; TP {choice.tp} at batch {choice.batch} for the {ms(work.tpot_s)} promise costs "
        f"{more:.0%} more per token than the cheapest"
    )


class LadderStep(msgspec.Struct, frozen=True):
    """The decode speed of a batch at one TP size.

    tp            the TP size
    ideal_s       seconds per token if only the weights were read, at the peak bandwidth
    expected_s    expected seconds per token
    parts         what these seconds consist of
    tokens_s_gpu  tokens per second and GPU
    usd_million   dollars per million tokens
    tax           relative change of tokens per second and GPU, compared with the smallest TP size
                  that holds the batch; None: the batch does not fit
    problem       why the size is impossible; empty: it is possible
    intensity     FLOPs per byte of the matrix products at this TP size
    balance       FLOPs per byte at which the GPU's compute and memory are equally busy
    """

    tp: int
    ideal_s: float
    expected_s: float
    parts: StepTimeParts
    tokens_s_gpu: float
    usd_million: float
    tax: float | None
    problem: str
    intensity: float
    balance: float


def tp_ladder(
    model: Llm, hardware: PlanHardware, batch: int, context: int, grids: Sequence[Grid]
) -> list[LadderStep]:
    """Return the decode speed of a batch at TP sizes 1, 2, 4, ... 16.

    batch    number of decoding requests
    context  tokens of each request's context
    grids    measured step times, which are used where they fit
    """
    steps: list[LadderStep] = []
    base: float | None = None
    tp = 1
    while tp <= MAX_LADDER_TP:
        times = ReplicaTimes(model, hardware.gpu, Layout(tp), grids)
        seconds = times.decode_s(batch, context)
        speed = batch / seconds / tp
        problem = _ladder_problem(model, hardware, tp, batch, context)
        if not problem and base is None:
            base = speed
        steps.append(
            LadderStep(
                *(tp, times.ideal_s(), seconds, times.parts(batch, context), speed),
                usd_per_million(hardware.price_hour, 1, speed),
                tp_tax(speed, base) if base is not None and not problem else None,
                problem,
                matrix_intensity(batch, model.width, tp, model.weight_bytes),
                hardware.gpu.flops(model.weight_bytes) / hardware.gpu.hbm_bytes_s,
            )
        )
        tp *= 2
    return steps


def _ladder_problem(model: Llm, hardware: PlanHardware, tp: int, batch: int, context: int) -> str:
    problem = heads_problem(facts_of(model), tp)
    if problem is not None:
        return problem
    memory = check_memory(model, hardware.gpu, Layout(tp), Demand(context))
    if _reason(memory, batch):
        return _reason(memory, batch)
    return f"crosses link domains of {hardware.domain}" if tp > hardware.domain else ""
