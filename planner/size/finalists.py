"""Replay of the best fleets on recorded traffic, with the routing policy of production.

A static estimate has steady batches; a replay has arrivals, queues and prefix caches. Fleets are
compared by attainment, the share of requests that are served within the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from planner.replay.options import ReplayOptions
from planner.replay.spec import FleetSpec, GroupKind, validate
from planner.replay.sweep import Comparison, ComparisonPoint, compare
from planner.size.draft import FleetPlan, SizingError
from planner.size.finalist import Finalist
from planner.size.front import FleetPoint
from planner.traces.shape import TraceRequest
from policies.model import STANDARD, Role, Slo
from policies.pricing.split import SplitRule
from policies.sizing.layout import Layout
from policies.sizing.model_shapes import MODELS

MAX_FINALISTS = 5
POLICY, SPLIT_POLICY = "prefix_aware", "priced"


def replay_finalists(
    plan: FleetPlan,
    points: Sequence[FleetPoint],
    requests: Sequence[TraceRequest],
    tell: Callable[[str, float], None] | None = None,
) -> list[Finalist]:
    """Replay the planned fleet and its best alternatives, and return their results.

    The alternatives are the best other points, and the plan with separate prefill and decode
    groups. Raises SizingError if no fleet can be replayed: the mock groups support TP only, and
    only built-in models.
    """
    results = []
    for fleet in _fleets(plan, points):
        is_split = any(kind.role is not Role.BOTH for kind in fleet.kinds)
        contest = Comparison(
            fleet=fleet,
            requests=requests,
            policies=(SPLIT_POLICY if is_split else POLICY,),
            options=ReplayOptions(standard=_slo(plan)),
        )
        (point,) = compare(contest, tell).points
        results.append(_finalist(plan, fleet, point))
    return sorted(results, key=lambda result: -result.attainment)


def _slo(plan: FleetPlan) -> Slo:
    limits = plan.work.limits
    return Slo("standard", limits.get("TTFT", STANDARD.ttft_s), limits.get("TPOT", STANDARD.tpot_s))


def _fleets(plan: FleetPlan, points: Sequence[FleetPoint]) -> Iterator[FleetSpec]:
    own = _kind(plan)
    yield validate(FleetSpec(f"{plan.replicas} x {plan.layout.label}", (own,)))
    for prefills in _divisions(plan):
        halves = (
            msgspec.structs.replace(own, count=prefills, role=Role.PREFILL),
            msgspec.structs.replace(own, count=plan.replicas - prefills, role=Role.DECODE),
        )
        name = f"{prefills} prefill + {plan.replicas - prefills} decode x {plan.layout.label}"
        yield validate(FleetSpec(name, halves, split=SplitRule(1)))
    for point in _others(plan, points):
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
        )
        name = f"{point.replicas} x {kind.layout.label} {_name(point.model)}"
        yield validate(FleetSpec(name, (msgspec.structs.replace(kind, max_num_seqs=256),)))


def _divisions(plan: FleetPlan) -> Iterator[int]:
    seconds, replicas = plan.loaded.seconds, plan.replicas
    if replicas < 2:
        return
    share = (seconds.prompt_s + seconds.cached_s) / seconds.total_s * replicas
    for prefills in sorted({int(share), int(share) + 1}):
        if 1 <= prefills < replicas:
            yield prefills


def _others(plan: FleetPlan, points: Sequence[FleetPoint]) -> list[FleetPoint]:
    limit_s = plan.work.tpot_s
    able = [p for p in points if p.is_best and p.gpu == plan.hardware.gpu.name]
    able = [p for p in able if limit_s is None or p.tpot_s <= limit_s] or able
    shapes = {
        (p.model, Layout(p.tp, p.pp, p.ep)): p
        for p in sorted(able, key=lambda point: -point.usd_million)
    }
    shapes.pop((plan.model.name, plan.layout), None)
    cheapest = sorted(shapes.values(), key=lambda point: point.usd_million)
    return cheapest[: MAX_FINALISTS - 1 - len(list(_divisions(plan)))]


def _kind(plan: FleetPlan) -> GroupKind:
    if plan.model.name.lower() not in MODELS:
        raise SizingError(
            f"--from replays built-in models; this plan is {plan.model.name}; valid: "
            f"{', '.join(name for name in MODELS if '/' not in name)}"
        )
    return GroupKind(
        *(_name(plan.model.name), plan.hardware.gpu.name, plan.layout.tp, plan.replicas),
        kv_tokens=plan.memory.tokens,
        kv_scalar_bytes=plan.model.kv_bytes,
        max_concurrency=plan.ceiling,
        pp=plan.layout.pp,
        ep=plan.layout.ep,
        dp=plan.layout.dp,
        cp=plan.layout.cp,
        link_gb_s=plan.hardware.gpu.nic_bytes_s / 1e9,
    )


def _name(full: str) -> str:
    model = MODELS[full.lower()]
    return next(name for name, known in MODELS.items() if known is model and name != "demo-8b")


def _finalist(plan: FleetPlan, fleet: FleetSpec, point: ComparisonPoint) -> Finalist:
    gpus = sum(kind.layout.gpus * kind.count for kind in fleet.kinds)
    ttft, tpot = point.figures.ttft, point.figures.tpot
    return Finalist(
        *(fleet.name, gpus, gpus * plan.hardware.price_hour, point.figures.attainment),
        None if ttft is None else ttft.p95,
        None if tpot is None else tpot.p95,
        point.figures.hit_ratio,
    )
