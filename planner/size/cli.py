"""`penstock size`: options to a plan, and the plan to the terminal, as JSON or as files.

Exit status: 0 the plan keeps all promises; 2 wrong input, or no layout holds the model; 3 the plan
misses a promise or needs more GPUs than there are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mockgpu.grids import Grid, load_grids
from planner.size import show
from planner.size.draft import FleetPlan, SizingError
from planner.size.emit import EMITTERS, Emission, emit
from planner.size.front import fleet_points, headline, tp_ladder
from planner.size.question import SizeOptions, hardware_of, model_of, workload_of
from planner.size.recipe import plan_fleet, variants
from policies.sizing.gpus import GPUS
from policies.sizing.model_shapes import MODELS, Llm

Model = Annotated[
    str, typer.Argument(help="A built-in name (llama-3.1-70b, ...), a config.json, or its folder.")
]
GpuKinds = Annotated[
    str, typer.Option("--gpu", help=f"{', '.join(GPUS)}, or a JSON file; several with commas.")
]
GpuCount = Annotated[
    int | None, typer.Option("--gpus", help="GPUs that there are; by default as many as needed.")
]
Prompt = Annotated[str, typer.Option("--in", help="Tokens of a typical prompt.")]
Output = Annotated[str, typer.Option("--out", help="Tokens of a typical answer.")]
Cached = Annotated[
    float, typer.Option("--cached", help="Share of the prompt in a prefix cache, 0 to 1.")
]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second.")]
Concurrency = Annotated[
    float | None, typer.Option("--concurrency", help="Requests in progress at once.")
]
Context = Annotated[
    str | None, typer.Option("--context", help="Longest prompt plus answer, like 8k.")
]
Ttft = Annotated[str | None, typer.Option("--ttft", help="Promised time to the first token.")]
Tpot = Annotated[str | None, typer.Option("--tpot", help="Promised time per further token.")]
Percentile = Annotated[
    float, typer.Option("--percentile", help="Percent of requests that a promise is kept for.")
]
Promises = Annotated[
    list[str] | None,
    typer.Option("--promise", help="A class: chat:ttft=1s,tpot=40ms,p=99. May be repeated."),
]
MaxConcurrency = Annotated[
    int | None, typer.Option("--max-concurrency", help="The gateway's cap per replica.")
]
Headroom = Annotated[float, typer.Option("--headroom", help="Share of KV to keep free.")]
Quant = Annotated[str, typer.Option("--quant", help="Weights: auto, bf16 or fp8.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="KV cache: bf16 or fp8.")]
DomainGpus = Annotated[
    int | None, typer.Option("--domain", help="GPUs that fast links connect; by default known.")
]
Price = Annotated[
    str, typer.Option("--price", help="Dollars per GPU and hour (an example): 2.5, or h100=2.5,...")
]
BestEffort = Annotated[
    bool,
    typer.Option("--best-effort", help="For a promise out of reach, use TP up to the knee."),
]
Front = Annotated[
    bool, typer.Option("--front", help="Compare all layouts of --gpus GPUs (default: one domain).")
]
Ladder = Annotated[
    int | None, typer.Option("--ladder", help="Show TP 1 to 16 at this batch.", metavar="BATCH")
]
Emit = Annotated[
    str | None,
    typer.Option("--emit", help=f"Print only {', '.join(EMITTERS)} for the plan."),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Name that clients use; by default the model's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def size(
    model: Model,
    gpu: GpuKinds = "h100",
    gpus: GpuCount = None,
    in_: Prompt = "2000",
    out: Output = "200",
    cached: Cached = 0.0,
    rate: Rate = None,
    concurrency: Concurrency = None,
    context: Context = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    percentile: Percentile = 95.0,
    promise: Promises = None,
    max_concurrency: MaxConcurrency = None,
    headroom: Headroom = 0.15,
    quant: Quant = "auto",
    kv_dtype: KvDtype = "bf16",
    domain: DomainGpus = None,
    price: Price = "2.5",
    best_effort: BestEffort = False,
    front: Front = False,
    ladder: Ladder = None,
    emit_: Emit = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Size a fleet for a model and promises, with the reason for each step. Needs no GPU."""
    options = SizeOptions(
        *(model, gpu, gpus, in_, out, cached, rate, concurrency, context, ttft, tpot, percentile),
        *(tuple(promise or ()), max_concurrency, headroom, quant, kv_dtype, domain, price),
        best_effort,
    )
    try:
        raise typer.Exit(_run(options, front, ladder, emit_, name, as_json))
    except SizingError as error:
        typer.echo(f"penstock size: {error}", err=True)
        raise typer.Exit(2) from None


def _run(
    options: SizeOptions,
    has_front: bool,
    batch: int | None,
    target: str | None,
    name: str | None,
    as_json: bool,
) -> int:
    if batch is not None and not 1 <= batch <= 4096:
        raise SizingError(f"--ladder {batch}; valid: 1 to 4096")
    model = model_of(options)
    plans = _plans(options, model, grids := load_grids())
    best = min(plans, key=lambda plan: (len(plan.shortfalls), plan.usd_hour))
    if target is not None:
        sys.stdout.write(emit(target, _emission(options, model, best, name)))
        return _status(best)
    points = [
        point
        for hardware in (hardware_of(options) if has_front else ())
        for point in fleet_points(variants(model, options.quant), hardware, best.work, grids)
    ]
    steps = (
        []
        if batch is None
        else tp_ladder(best.model, best.hardware, batch, best.work.mean_context, grids)
    )
    if as_json:
        typer.echo(json.dumps(show.as_plain(plans, points, steps), indent=2))
        return _status(best)
    lines = [*show.plan_lines(best)]
    if len(plans) > 1:
        lines += ["", *show.comparison_lines(plans)]
    if points:
        lines += ["", *show.front_lines(points, headline(points, best.work))]
    if steps:
        lines += ["", *show.ladder_lines(steps, batch or 1)]
    typer.echo("\n".join(lines))
    return _status(best)


def _plans(options: SizeOptions, model: Llm, grids: Sequence[Grid]) -> list[FleetPlan]:
    """Return one plan per kind of GPU that can hold the model. Raises SizingError if none can."""
    plans: list[FleetPlan] = []
    problems: list[SizingError] = []
    work = workload_of(options, model)
    for hardware in hardware_of(options):
        try:
            plans.append(plan_fleet(variants(model, options.quant), hardware, work, grids))
        except SizingError as error:
            problems.append(error)
    if not plans:
        raise problems[0]
    return plans


def _emission(options: SizeOptions, model: Llm, plan: FleetPlan, name: str | None) -> Emission:
    is_built_in = options.model.lower() in MODELS
    folder = Path(options.model)
    source = model.name if is_built_in else str(folder if folder.is_dir() else folder.parent)
    is_quantising = plan.model.weight_bytes < model.weight_bytes
    served = options.model.lower() if is_built_in else Path(source).resolve().name
    if is_quantising:
        served += "-fp8"
    return Emission(plan, source, name or served, is_quantising)


def _status(plan: FleetPlan) -> int:
    return 3 if plan.shortfalls or any(finding.is_error for finding in plan.findings) else 0
