"""Fleets of one shape (weights, TP, PP), with a given number of replicas or for a request rate.

They are computed from the points of pareto_front.py. Replicas of a shape are independent and equal,
so their request rates are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

import msgspec

from planner.size.pareto_front import NEEDLESS_PP, FleetPoint
from planner.size.units import ms


class LoadChoice(msgspec.Struct, frozen=True):
    """The smallest fleet of one layout that serves a request rate within the promised latencies.

    point   one of its replicas at the best batch; None: no batch keeps the promises
    gpus    number of its GPUs
    reason  why the fleet is impossible; empty: it is possible
    """

    shape: FleetPoint
    point: FleetPoint | None
    gpus: int
    reason: str


def shapes_of(points: Sequence[FleetPoint]) -> list[list[FleetPoint]]:
    """Return the points of each shape (weights, TP, PP), sorted by batch.

    Shapes with more pipeline stages than needed are left out.
    """
    shapes: dict[tuple[str, int, int], list[FleetPoint]] = {}
    for point in points:
        shapes.setdefault((point.model, point.tp, point.pp), []).append(point)
    return [
        batches
        for batches in shapes.values()
        if all(point.reason != NEEDLESS_PP for point in batches)
    ]


def replica_counts(gpus: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of GPUs."""
    return [1 << exponent for exponent in range(gpus.bit_length())]


def with_replicas(point: FleetPoint, replicas: int, gpus: int) -> FleetPoint:
    """Return a copy of a compared fleet with another number of replicas.

    point     the fleet: a layout at one batch size
    replicas  the new number of replicas
    gpus      number of available GPUs

    If the replicas need more GPUs than there are, the copy has that as its reason. Only a copy with
    as many replicas as `point` can be marked as one of the best.
    """
    needed = point.tp * point.pp * replicas
    reason = point.reason or (f"needs {needed} GPUs of {gpus}" if needed > gpus else "")
    return msgspec.structs.replace(
        point,
        replicas=replicas,
        requests_s=point.requests_s / point.replicas * replicas,
        reason=reason,
        is_best=point.is_best and replicas == point.replicas,
    )


def choices_for(
    points: Sequence[FleetPoint],
    requests_s: float,
    tpot_s: float | None,
    ttft_s: float | None,
    gpus: int,
) -> Iterator[LoadChoice]:
    """Yield for each shape the smallest fleet that serves a request rate within the promises.

    points      the points of pareto_front.fleet_points
    requests_s  requests per second
    tpot_s      promised seconds per token; None: any
    ttft_s      promised seconds to the first token; None: any
    gpus        number of available GPUs
    """
    for batches in shapes_of(points):
        possible = [point for point in batches if not point.reason]
        kept = [
            point
            for point in possible
            if (tpot_s is None or point.tpot_s <= tpot_s)
            and (ttft_s is None or point.ttft_s <= ttft_s)
        ]
        if not kept:
            reason = batches[0].reason or f"no batch keeps {_promises_text(tpot_s, ttft_s)}"
            yield LoadChoice(batches[0], None, 0, reason)
            continue
        best = max(kept, key=lambda point: point.requests_s)
        replicas = ceil(requests_s / (best.requests_s / best.replicas))
        point = with_replicas(best, replicas, gpus)
        yield LoadChoice(point, point, point.tp * point.pp * replicas, point.reason)


def _promises_text(tpot_s: float | None, ttft_s: float | None) -> str:
    texts = []
    if tpot_s is not None:
        texts.append(f"{ms(tpot_s)} per token")
    if ttft_s is not None:
        texts.append(f"{ms(ttft_s)} to the first token")
    return " and ".join(texts)
