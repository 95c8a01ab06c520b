"""Replays the best fleets of a sizing on recorded traffic, each with its own gateway.yaml.

The estimate of a plan assumes steady batches. A replay also has arrivals, queues and prefix caches.
Fleets are compared by attainment, the share of requests served within the promised latencies.
Policy, admission, limits and health checks are those of the plan's gateway.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from planner.plan.config_to_replay import PoolCase
from planner.process_map import ReportShare, WorkerError, map_in_processes
from planner.replay.fleet_sim import replay
from planner.replay.fleet_spec import FleetSpec, GroupKind, validate
from planner.replay.results import ReplayFigures, RequestEnd, figures
from planner.replay.traffic import traffic
from planner.size.finalist import Finalist
from planner.size.pareto_front import FleetPoint
from planner.size.plan_draft import FleetPlan, SizingError
from planner.traces.recorded_request import TraceRequest
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Role
from policies.sizing.gpus import GPUS
from policies.sizing.model_shapes import MODELS
from policies.sizing.parallel_layout import Layout

MAX_FINALISTS = 5
SPLIT_POLICY = "priced"


class _FinalistReplay(msgspec.Struct, frozen=True):
    # The input of a process that replays one fleet.
    plan: FleetPlan
    case: PoolCase
    requests: Sequence[TraceRequest]


def replay_finalists(
    plan: FleetPlan,
    case: PoolCase,
    points: Sequence[FleetPoint],
    requests: Sequence[TraceRequest],
    on_progress: Callable[[str, float], None],
    processes: int = 1,
) -> list[Finalist]:
    """Replay the planned fleet and its best alternatives, and return their results.

    case         the pool of the plan's gateway.yaml. The alternatives are the best other points,
                 and the plan with separate prefill and decode engines. Their pools have other
                 endpoints, and another policy if they split requests
    on_progress  called with the name of a fleet and the share of its requests that have ended
    processes    maximum number of replays at a time, each in its own process if there are several.
                 The results do not depend on it

    Raises WorkerError if a process ends without a result.
    """
    replays = []
    for fleet in _fleets(plan, case, points):
        is_split = any(kind.role is not Role.BOTH for kind in fleet.kinds)
        own = msgspec.structs.replace(
            case, fleet=fleet, policy_name=SPLIT_POLICY if is_split else case.policy_name
        )
        replays.append(_FinalistReplay(plan, own, requests))

    def show_progress(index: int, share: float) -> None:
        on_progress(replays[index].case.fleet.name, share)

    for index in range(len(replays)):
        show_progress(index, 0.0)
    try:
        results = map_in_processes(_replay_one, replays, processes, show_progress)
    except WorkerError as error:
        name = replays[error.index].case.fleet.name
        raise WorkerError(error.index, f"replay of {name}: {error}") from None
    return sorted(results, key=lambda result: -result.attainment)


def _replay_one(task: _FinalistReplay, report_share: ReportShare) -> Finalist:
    return replay_case(task.plan, task.case, task.requests, lambda _, share: report_share(share))


def replay_case(
    plan: FleetPlan,
    case: PoolCase,
    requests: Sequence[TraceRequest],
    on_progress: Callable[[str, float], None] | None = None,
) -> Finalist:
    """Replay one pool on recorded traffic and return its result, with the plan's price of a GPU.

    `on_progress` is called with the name of the fleet and the share of its requests that have
    ended.
    """

    def watch(_: float, ended: int) -> None:
        if on_progress is not None:
            on_progress(case.fleet.name, ended / max(1, len(requests)))

    run = replay(
        *(case.fleet, traffic(requests), case.policy(), case.admission(), case.options()),
        *(case.limits, case.shares),
        watch=watch,
    )
    return _finalist(plan, case.fleet, figures(run))


def known_model(plan: FleetPlan) -> str:
    """Return the built-in name of a sizing plan's model.

    Raises SizingError if its model or GPU is not built in, because only those can be simulated.
    """
    gpu = plan.hardware.gpu.name
    if plan.model.name.lower() not in MODELS:
        raise SizingError(
            f"--from needs a built-in model, but the plan is for {plan.model.name}; built-in "
            f"models: {', '.join(name for name in MODELS if '/' not in name)}"
        )
    if gpu not in GPUS:
        raise SizingError(
            f"--from needs a built-in GPU type, not {gpu}; built-in types: {', '.join(GPUS)}"
        )
    return _name(plan.model.name)


def _fleets(plan: FleetPlan, case: PoolCase, points: Sequence[FleetPoint]) -> Iterator[FleetSpec]:
    planned = msgspec.structs.replace(case.fleet, name=f"{plan.replicas} x {plan.layout.label}")
    yield planned
    own = _kind(plan, planned)
    for prefills in _divisions(plan):
        halves = (
            msgspec.structs.replace(own, count=prefills, role=Role.PREFILL),
            msgspec.structs.replace(own, count=plan.replicas - prefills, role=Role.DECODE),
        )
        name = f"{prefills} prefill + {plan.replicas - prefills} decode x {plan.layout.label}"
        split = SplitRule(1)
        yield validate(msgspec.structs.replace(planned, name=name, kinds=halves, split=split))
    for point in _others(plan, points):
        yield _fleet_of_point(plan, own, point, planned)


def _fleet_of_point(
    plan: FleetPlan, own: GroupKind, point: FleetPoint, planned: FleetSpec
) -> FleetSpec:
    kind = msgspec.structs.replace(
        own,
        model=_name(point.model),
        tp=point.tp,
        pp=point.pp,
        ep=point.ep,
        dp=1,
        cp=1,
        count=point.replicas,
        kv_tokens=None,
        max_concurrency=min(point.batch, plan.work.max_concurrency or point.batch),
    )
    name = f"{point.replicas} x {kind.layout.label} {_name(point.model)}"
    return validate(msgspec.structs.replace(planned, name=name, kinds=(kind,)))


def _divisions(plan: FleetPlan) -> Iterator[int]:
    seconds, replicas = plan.loaded.seconds, plan.replicas
    if replicas < 2:
        return
    share = (seconds.prompt_s + seconds.cached_s) / seconds.total_s * replicas
    for prefills in sorted({int(share), int(share) + 1}):
        if 1 <= prefills < replicas:
            yield prefills


def _others(plan: FleetPlan, points: Sequence[FleetPoint]) -> list[FleetPoint]:
    # Return the cheapest points of the best other shapes: each with the batch at which it is
    # cheapest within the promised time, whether or not another shape is better at that batch.
    limit_s = plan.work.tpot_s
    own = [p for p in points if not p.reason and p.gpu == plan.hardware.gpu.name]
    in_time = [p for p in own if limit_s is None or p.tpot_s <= limit_s]
    best = [p for p in in_time if p.is_best]
    in_time, best = (in_time, best) if best else (own, [p for p in own if p.is_best])
    shapes = {_shape(point) for point in best} - {(plan.model.name, plan.layout)}
    cheapest: dict[tuple[str, Layout], FleetPoint] = {}
    for point in sorted(in_time, key=lambda point: point.usd_million):
        if _shape(point) in shapes:
            cheapest.setdefault(_shape(point), point)
    return list(cheapest.values())[: MAX_FINALISTS - 1 - len(list(_divisions(plan)))]


def _shape(point: FleetPoint) -> tuple[str, Layout]:
    return point.model, Layout(point.tp, point.pp, point.ep)


def _kind(plan: FleetPlan, planned: FleetSpec) -> GroupKind:
    # Return the plan's groups with what a gateway.yaml does not say.
    return msgspec.structs.replace(
        planned.kinds[0],
        count=plan.replicas,
        kv_scalar_bytes=plan.model.kv_bytes,
        link_gb_s=plan.hardware.gpu.nic_bytes_s / 1e9,
    )


def _name(full: str) -> str:
    model = MODELS[full.lower()]
    return next(name for name, known in MODELS.items() if known is model and name != "demo-8b")


def _finalist(plan: FleetPlan, fleet: FleetSpec, result: ReplayFigures) -> Finalist:
    gpus = sum(kind.layout.gpus * kind.count for kind in fleet.kinds)
    return Finalist(
        *(fleet.name, gpus, gpus * plan.hardware.price_hour, result.attainment),
        result.ends.get(RequestEnd.SHED, 0) / max(1, result.offered),
        None if result.ttft is None else result.ttft.p95,
        None if result.tpot is None else result.tpot.p95,
        result.hit_ratio,
    )
