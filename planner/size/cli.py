"""The command `penstock size`: converts its options to a plan, and prints it as text, JSON or
files.

Exit status:

- 0: the plan keeps all latency promises
- 1: the process of a replay failed
- 2: the input is wrong, or no layout holds the model
- 3: the plan misses a promise, or needs more GPUs than there are
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from command_line import Argument, Option, write_line
from mockgpu.timing.step_time_grids import Grid, load_grids
from planner.output_files import check_writable
from planner.size import show
from planner.size.finalist_result import Finalist
from planner.size.input_options import SizeOptions, hardware_of, model_of, workload_of
from planner.size.pareto_front import (
    BATCHES,
    FleetPoint,
    LadderStep,
    fleet_points,
    headline,
    tp_ladder,
)
from planner.size.plan_draft import FleetPlan, SizingError
from planner.size.plan_files import EMITTERS, Emission, emit
from planner.size.recipe import plan_fleet, variants
from policies.sizing.gpus import GPUS
from policies.sizing.model_shapes import MODELS, Llm

Model = Annotated[
    str,
    Argument(
        help="Model to size: a built-in name such as llama-3.1-70b, a config.json file, or the "
        "folder that contains it."
    ),
]
GpuKinds = Annotated[
    str,
    Option(
        "--gpu",
        help=f"GPU types to consider: {', '.join(GPUS)}, or a JSON file; "
        "separate several by commas.",
    ),
]
GpuCount = Annotated[
    int | None,
    Option("--gpus", help="Number of available GPUs. Default: as many as needed."),
]
Prompt = Annotated[
    str, Option("--in", help="Number of tokens of a typical prompt, cached ones included.")
]
Output = Annotated[str, Option("--out", help="Number of tokens of a typical answer.")]
Cached = Annotated[
    float,
    Option("--cached", help="Share of a prompt that is found in a prefix cache, 0 to 1."),
]
Rate = Annotated[float | None, Option("--rate", help="Mean number of requests per second.")]
Concurrency = Annotated[
    float | None,
    Option("--concurrency", help=("Mean number of requests in progress at the same time.")),
]
Context = Annotated[
    str | None,
    Option(
        "--context",
        help=("Maximum number of tokens of a prompt and its answer together, for example 8k."),
    ),
]
Ttft = Annotated[
    str | None, Option("--ttft", help="Promised maximum time to the first token, for example 2s.")
]
Tpot = Annotated[
    str | None,
    Option(
        "--tpot", help=("Promised maximum time per output token after the first, for example 50ms.")
    ),
]
Percentile = Annotated[
    float,
    Option(
        "--percentile", help=("Percentage of requests that must stay within each promised time.")
    ),
]
Promises = Annotated[
    list[str] | None,
    Option(
        "--promise",
        help="Promised times of one service class, for example chat:ttft=1s,tpot=40ms,p=99. "
        "Repeat the option for more classes.",
    ),
]
MaxConcurrency = Annotated[
    int | None,
    Option(
        "--max-concurrency",
        help=("Maximum number of concurrent requests that the gateway sends to a replica."),
    ),
]
Headroom = Annotated[
    float, Option("--headroom", help="Share of the KV memory to keep free, 0 to 1.")
]
Quant = Annotated[
    str,
    Option(
        "--quant", help="Data type of the weights: auto (that of the model's files), bf16 or fp8."
    ),
]
KvDtype = Annotated[str, Option("--kv-dtype", help="Data type of the KV cache: bf16 or fp8.")]
DomainGpus = Annotated[
    int | None,
    Option(
        "--domain",
        help=(
            "Number of GPUs that fast links (NVLink) connect. Default: that of the GPU type, "
            "such as 8."
        ),
    ),
]
Price = Annotated[
    str,
    Option(
        "--price",
        help=(
            "Price in dollars per GPU and hour: 2.5 for all GPU types, or one for each, such as "
            "h100=2.5,h200=3.5."
        ),
    ),
]
BestEffort = Annotated[
    bool,
    Option(
        "--best-effort",
        help="If no TP size keeps a promised time, do not fail; use the largest TP that still "
        "makes decoding clearly faster.",
    ),
]
SmallestTp = Annotated[
    int,
    Option(
        "--tp",
        help=("Smallest TP size to consider, for example if a larger one than needed pays off."),
    ),
]
Front = Annotated[
    bool,
    Option(
        "--front",
        help="Compare all layouts of --gpus GPUs. Without --gpus: of as many GPUs as fast links "
        "connect.",
    ),
]
Ladder = Annotated[
    int | None,
    Option(
        "--ladder",
        help="Show the decode speed at TP 1 to 16 with this number of requests in a batch.",
        metavar="BATCH",
    ),
]
Emit = Annotated[
    str | None,
    Option("--emit", help=f"Print only one file or command of the plan: {', '.join(EMITTERS)}."),
]
Name = Annotated[
    str | None,
    Option("--name", help="Model name that clients use. Default: the model's own name."),
]
Against = Annotated[
    str | None,
    Option(
        "--against",
        help=(
            "Second model, usually a smaller one, to size for the same traffic and compare the "
            "costs."
        ),
    ),
]
FirstPort = Annotated[
    int,
    Option(
        "--first-port",
        min=1,
        max=60_000,
        help="With --emit: port of the first engine; the other engines use the following ports.",
    ),
]
From = Annotated[
    Path | None,
    Option(
        "--from",
        is_file=True,
        help="Access log or trace on which to replay the plan and the best other layouts.",
    ),
]
Last = Annotated[
    str,
    Option(
        "--last",
        metavar="TIME",
        help=(
            "Read only this much of the end of the log given to --from or --calibrate, for "
            "example 1h."
        ),
    ),
]
Calibrate = Annotated[
    Path | None,
    Option(
        "--calibrate",
        is_file=True,
        help="Access log of engines that already serve the model. The GPU's step times are "
        "fitted to it before planning.",
    ),
]
MeasuredTp = Annotated[
    int | None,
    Option("--measured-tp", help="With --calibrate: TP size of the engines that wrote the log."),
]
Report = Annotated[
    Path | None,
    Option(
        "--report",
        check=check_writable,
        help="File to which an HTML page with the plan and all layouts is written.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print the plan as JSON instead of text.")]


ConfigReader = Callable[[str], Mapping[str, Any]]


class SizeOutput(msgspec.Struct, frozen=True):
    """What `penstock size` prints besides its plan, or instead of it, as its options say.

    read_config  function that reads the gateway.yaml of the plan for replays, as the gateway does
    """

    front: bool
    ladder: int | None
    against: str | None
    target: str | None
    name: str | None
    first_port: int
    log: Path | None
    last: str
    report: Path | None
    as_json: bool
    read_config: ConfigReader


def size(
    read_config: ConfigReader,
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
    tp: SmallestTp = 1,
    front: Front = False,
    ladder: Ladder = None,
    against: Against = None,
    emit_: Emit = None,
    name: Name = None,
    first_port: FirstPort = 9000,
    from_: From = None,
    last: Last = "60m",
    calibrate: Calibrate = None,
    measured_tp: MeasuredTp = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Size a fleet for a model and promised latencies, and give reasons. Needs no GPU."""
    options = SizeOptions(
        *(model, gpu, gpus, in_, out, cached, rate, concurrency, context, ttft, tpot, percentile),
        *(tuple(promise or ()), max_concurrency, headroom, quant, kv_dtype, domain, price),
        *(best_effort, tp),
    )
    try:
        if calibrate is not None or measured_tp is not None:
            if from_ is not None:
                raise SizingError("--calibrate cannot be combined with --from")
            options = _calibrated(options, calibrate, measured_tp, last)
        raise SystemExit(
            _run(
                options,
                SizeOutput(
                    *(front, ladder, against, emit_, name, first_port, from_, last, report),
                    *(as_json, read_config),
                ),
            )
        )
    except SizingError as error:
        write_line(f"penstock size: {error}", err=True)
        raise SystemExit(2) from None


def _calibrated(options: SizeOptions, log: Path | None, tp: int | None, last: str) -> SizeOptions:
    # Return the options with a GPU whose constants are fitted to the log; says so on stderr.
    from planner.size.gpu_constants_fit import calibrate_from, calibration_lines

    hardware = hardware_of(options)
    if log is None or tp is None or len(hardware) > 1:
        raise SizingError("--calibrate requires --measured-tp and exactly one GPU type in --gpu")
    model = variants(model_of(options), options.quant)[0]
    found = calibrate_from(model, hardware[0].gpu, tp, log, last)
    write_line("\n".join(calibration_lines(found, tp, log)), err=True)
    return msgspec.structs.replace(options, calibrated=found.gpu)


def _run(options: SizeOptions, output: SizeOutput) -> int:
    _check_output(output)
    batch = output.ladder
    if batch is not None and not 1 <= batch <= 4096:
        raise SizingError(f"--ladder must be a batch size from 1 to 4096, not {batch}")
    model = model_of(options)
    plans = _plans(options, model, grids := load_grids())
    best = min(plans, key=lambda plan: (len(plan.shortfalls), plan.usd_hour))
    if output.target is not None:
        sys.stdout.write(emit(output.target, _emission(options, model, best, output)))
        return _status(best)
    points = _points(options, model, best, grids) if output.front else []
    steps = (
        []
        if batch is None
        else tp_ladder(best.model, best.hardware, batch, best.work.mean_context, grids)
    )
    if output.report is not None:
        output.report.write_text(_page(options, model, best, grids))
    results = _replayed(options, output, model, best, grids)
    other = _against(options, output, grids)
    if output.as_json:
        plain = show.as_plain(plans, points, steps, results, other)
        write_line(json.dumps(plain, indent=2))
    else:
        write_line("\n".join(_lines(plans, best, points, steps, batch or 1, results, other)))
    return _status(best)


def _check_output(output: SizeOutput) -> None:
    # Raise SizingError for options that --emit would ignore.
    options = {
        "--front": output.front,
        "--ladder": output.ladder,
        "--against": output.against,
        "--from": output.log,
        "--report": output.report,
        "--json": output.as_json,
    }
    ignored = [name for name, value in options.items() if value not in (None, False)]
    if output.target is not None and ignored:
        raise SizingError(
            f"--emit prints only one file; to get {ignored[0]}, run the command again without "
            "--emit"
        )


def _lines(
    plans: Sequence[FleetPlan],
    best: FleetPlan,
    points: Sequence[FleetPoint],
    steps: Sequence[LadderStep],
    batch: int,
    results: Sequence[Finalist],
    other: FleetPlan | None,
) -> Iterator[str]:
    yield from show.plan_lines(best)
    if len(plans) > 1:
        yield from ("", *show.comparison_lines(plans))
    if points:
        own = [point for point in points if point.gpu == best.hardware.gpu.name]
        title = f"{best.hardware.gpu.name}: {headline(own, best.work)}"
        yield from ("", *show.front_lines(points, title))
    if steps:
        yield from ("", *show.ladder_lines(steps, batch))
    if results:
        yield from ("", *show.finalist_lines(results))
    if other is not None:
        yield from ("", *show.against_lines(best, other))


def _page(options: SizeOptions, model: Llm, plan: FleetPlan, grids: Sequence[Grid]) -> str:
    from planner.size.report_page import size_page

    hardware, context = plan.hardware, plan.work.mean_context
    points = fleet_points(variants(model, options.quant), hardware, plan.work, grids)
    ladders = {batch: tp_ladder(plan.model, hardware, batch, context, grids) for batch in BATCHES}
    return size_page(plan, points, ladders)


def _against(options: SizeOptions, output: SizeOutput, grids: Sequence[Grid]) -> FleetPlan | None:
    # Return the cheapest plan of the model in --against, for the same traffic and promises.
    #
    # Return None without that option.
    if output.against is None:
        return None
    other = msgspec.structs.replace(options, model=output.against)
    plans = _plans(other, model_of(other), grids)
    return min(plans, key=lambda plan: (len(plan.shortfalls), plan.usd_hour))


def _points(
    options: SizeOptions, model: Llm, plan: FleetPlan, grids: Sequence[Grid]
) -> list[FleetPoint]:
    return [
        point
        for hardware in hardware_of(options)
        for point in fleet_points(variants(model, options.quant), hardware, plan.work, grids)
    ]


def _replayed(
    options: SizeOptions, output: SizeOutput, model: Llm, plan: FleetPlan, grids: Sequence[Grid]
) -> list[Finalist]:
    # Replay the best fleets if a log was given, and return the results.
    #
    # The replay is imported only then.
    if output.log is None:
        return []
    from planner.process_map import WorkerError
    from planner.size.finalist_replays import replay_log

    enough = msgspec.structs.replace(plan.hardware, gpus=plan.hardware.gpus or plan.gpus)
    models = variants(model, options.quant)
    points = fleet_points(models, enough, plan.work, grids)
    emission = _emission(options, model, plan, output)
    log = output.log, output.last
    try:
        return replay_log(emission, points, *log, output.read_config, is_quiet=output.as_json)
    except WorkerError as error:
        write_line(f"penstock size: {error}", err=True)
        raise SystemExit(1) from None


def _plans(options: SizeOptions, model: Llm, grids: Sequence[Grid]) -> list[FleetPlan]:
    # Return one plan per kind of GPU that can hold the model.
    #
    # Raises SizingError if none can.
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


def _emission(options: SizeOptions, model: Llm, plan: FleetPlan, output: SizeOutput) -> Emission:
    is_built_in = options.model.lower() in MODELS
    folder = Path(options.model)
    source = model.name if is_built_in else str(folder if folder.is_dir() else folder.parent)
    is_quantising = plan.model.weight_bytes < model.weight_bytes
    served = options.model.lower() if is_built_in else Path(source).resolve().name
    if is_quantising:
        served += "-fp8"
    return Emission(plan, source, output.name or served, is_quantising, output.first_port)


def _status(plan: FleetPlan) -> int:
    return 3 if plan.shortfalls or any(finding.is_error for finding in plan.findings) else 0
