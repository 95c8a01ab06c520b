"""Decides after drift whether another layout is worth a switch, by replaying recent requests.

The other layouts are those of `penstock size --from` for these requests. All fleets get the same
requests, and are judged by the service classes of the running configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import process_time
from typing import Any

import msgspec

from mockgpu.timing.step_time_grids import load_grids
from planner.drift.request_measures import shape_of
from planner.plan.config_to_replay import Assumptions, PoolCase, PoolCaseError, cases
from planner.size.finalist_replays import replay_case, replay_finalists
from planner.size.finalist_result import Finalist
from planner.size.input_options import SizeOptions, hardware_of, model_of, workload_of
from planner.size.pareto_front import fleet_points
from planner.size.plan_draft import FleetPlan, SizingError
from planner.size.plan_files import POOL, Emission, emit
from planner.size.recipe import plan_fleet, variants
from planner.traces import TraceRequest
from policies.sizing.workload_drift import ShapeMemory

LEAST_GAIN = 0.05
MAX_LOST = 0.005
"""Largest loss of attainment (0 to 1) that a suggested fleet may cause.

Attainment is the share of requests that are served in time.
"""

MAX_REQUESTS = 20_000
LOAD_BYTES_S = 2e9
"""Bytes per second at which each GPU is assumed to load weights, if no reload time is given."""

DEFAULT_PRICE = 2.5

ConfigReader = Callable[[str], Mapping[str, Any]]
"""A function that reads the text of a gateway.yaml.

It returns the configuration as plain values with all defaults.
"""

Progress = Callable[[str, float], None]


class SuggestionError(ValueError):
    """Raised if no suggestion can be computed. The message contains the reason and what to do."""


class SuggestionInput(msgspec.Struct, frozen=True):
    """The configuration and the options from which another fleet is suggested.

    config    the running configuration as plain values
    assumed   model and GPU to assume if the configuration does not contain them
    reload_s  seconds in which one engine reloads; None: from the size of its weights
    limit_s   maximum CPU seconds of the replays
    """

    config: Mapping[str, Any]
    pool: str
    requests: Sequence[TraceRequest]
    assumed: Assumptions
    read_config: ConfigReader
    reload_s: float | None = None
    limit_s: float = 300.0


class Suggestion(msgspec.Struct, frozen=True):
    """The running fleet compared with the best other one, for the same requests.

    gain      relative increase of requests served in time per dollar, if the best fleet replaces
              the running one
    switch_s  cost of reloading the engines, as seconds of the whole fleet's work
    span_s    seconds of traffic that were replayed
    reason    why the other fleet is suggested, or why not
    """

    running: Finalist
    best: Finalist
    gain: float
    switch_s: float
    span_s: float
    is_suggested: bool
    reason: str


def suggest(given: SuggestionInput, on_progress: Progress | None = None) -> Suggestion:
    """Replay the running fleet and the planned ones, and return the comparison.

    Raises SuggestionError if the replays are impossible or take too long.
    """
    requests = list(given.requests)[-MAX_REQUESTS:]
    if not requests:
        raise SuggestionError("the log has no request for the pool")
    begin_s = requests[0].arrival_s
    requests = [
        msgspec.structs.replace(request, arrival_s=request.arrival_s - begin_s)
        for request in requests
    ]
    try:
        running = cases(given.config, given.assumed)[given.pool]
        plan, emission = _plan(given, running, requests)
        planned = cases(given.read_config(emit("gateway", emission)), _kind_of(running))[POOL]
        own = msgspec.structs.replace(planned, classes=running.classes, standard=running.standard)
        watch = _deadline(process_time() + given.limit_s, given.limit_s, on_progress)
        now = replay_case(plan, running, requests, watch)
        hardware = msgspec.structs.replace(plan.hardware, gpus=plan.hardware.gpus or plan.gpus)
        points = fleet_points([plan.model], hardware, plan.work, load_grids())
        finalists = replay_finalists(plan, own, points, requests, watch)
    except (PoolCaseError, SizingError) as error:
        raise SuggestionError(str(error)) from None
    switch_s = given.reload_s or plan.model.params * plan.model.weight_bytes / (
        plan.layout.gpus * LOAD_BYTES_S
    )
    return choose(now, finalists, switch_s, max(1.0, requests[-1].arrival_s))


def choose(
    running: Finalist, finalists: Sequence[Finalist], switch_s: float, span_s: float
) -> Suggestion:
    """Decide whether one of the replayed fleets should replace the running one.

    running    the result of the running fleet
    finalists  the results of other fleets, for the same requests
    switch_s   what reloading the engines costs, in seconds of the whole fleet's work
    span_s     seconds of traffic that were replayed

    A fleet is suggested if it meets three conditions:

    - It serves 5 % more requests in time per dollar.
    - Its attainment (share of requests in time) is not lower.
    - It gains more in `span_s` seconds than reloading costs.
    """
    eligible = [each for each in finalists if each.attainment >= running.attainment - MAX_LOST]
    best = max(eligible or finalists, key=_value)
    gain = _value(best) / _value(running) - 1 if _value(running) else float(_value(best) > 0)
    if not eligible:
        reason = "every other fleet serves fewer requests in time"
    elif gain <= LEAST_GAIN:
        reason = f"the best other fleet gains {gain:.1%}, and at least 5 % are required"
    elif gain * span_s <= switch_s:
        reason = (
            f"reloading the engines costs {switch_s:.0f} s of the fleet's work, and the gain in "
            f"{span_s / 60:.0f} minutes is {gain * span_s:.0f} s"
        )
    else:
        reason = f"it serves {gain:.1%} more requests in time per dollar"
    is_suggested = bool(eligible) and gain > LEAST_GAIN and gain * span_s > switch_s
    return Suggestion(running, best, gain, switch_s, span_s, is_suggested, reason)


def _value(fleet: Finalist) -> float:
    return fleet.attainment / fleet.usd_hour


def _deadline(ends_at: float, limit_s: float, on_progress: Progress | None) -> Progress:
    def watch(name: str, share: float) -> None:
        if process_time() > ends_at:
            raise SuggestionError(
                f"the replays took more than {limit_s:.0f} s of CPU time; give a shorter --last, "
                "or --limit"
            )
        if on_progress is not None:
            on_progress(name, share)

    return watch


def _kind_of(running: PoolCase) -> Assumptions:
    kind = running.fleet.kinds[0]
    return Assumptions(kind.model, kind.gpu)


def _plan(
    given: SuggestionInput, running: PoolCase, requests: Sequence[TraceRequest]
) -> tuple[FleetPlan, Emission]:
    # Return the plan of `penstock size` for these requests, with the running model, GPU and limits.
    kind = running.fleet.kinds[0]
    memory = ShapeMemory()
    shapes = [shape_of(memory, request) for request in requests]
    prompts = sum(shape.prompt_tokens for shape in shapes)
    new = sum(shape.prompt_tokens * shape.uncached_share for shape in shapes)
    prices = given.config.get("hardware", {}).get("price_per_hour", {})
    span_s = max(1.0, requests[-1].arrival_s - requests[0].arrival_s)
    options = SizeOptions(
        model=kind.model,
        gpu=kind.gpu,
        gpus=None,
        prompt=str(max(1, round(prompts / len(shapes)))),
        output=str(max(1, round(sum(s.output_tokens for s in shapes) / len(shapes)))),
        cached=min(0.999, max(0.0, 1 - new / prompts)),
        rate=max(1e-6, len(requests) / span_s),
        concurrency=None,
        context=str(max(s.prompt_tokens + s.output_tokens for s in shapes)),
        ttft=f"{running.standard.ttft_s}s",
        tpot=f"{running.standard.tpot_s}s",
        percentile=95.0,
        promises=(),
        max_concurrency=kind.max_concurrency,
        headroom=0.15,
        quant="auto",
        kv_dtype="bf16",
        domain=None,
        price=str(prices.get(kind.gpu, DEFAULT_PRICE)),
        is_best_effort=False,
    )
    # Another data type of the weights changes answers, which is not for a replay to judge.
    models = variants(model_of(options), options.quant)[:1]
    plan = plan_fleet(
        models, hardware_of(options)[0], workload_of(options, models[0]), load_grids()
    )
    return plan, Emission(plan, kind.model, kind.model)
