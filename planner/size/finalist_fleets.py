"""Chooses the fleets that a sizing replays on recorded traffic: the best ones, called finalists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from planner.replay.fleet_spec import FleetSpec, GroupKind, validate
from planner.size.pareto_front import FleetPoint
from planner.size.plan_draft import FleetPlan, SizingError
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Role
from policies.sizing.gpus import GPUS
from policies.sizing.model_shapes import MODELS
from policies.sizing.parallel_layout import Layout

MAX_FINALISTS = 5


def fleets_to_replay(
    plan: FleetPlan, planned: FleetSpec, points: Sequence[FleetPoint]
) -> Iterator[FleetSpec]:
    """Yield the planned fleet and its best alternatives, at most MAX_FINALISTS together.

    Alternatives are the plan with separate prefill and decode engines, and the best other points.
    `planned` is the fleet of the plan's gateway.yaml.
    """
    planned = msgspec.structs.replace(planned, name=f"{plan.replicas} x {plan.layout.label}")
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
