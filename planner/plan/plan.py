"""The comparison: every pool of both configurations on one traffic, and what differs. Pure but for the wall clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planner.plan.case import Case
from planner.plan.recent import Recent
from planner.replay.figures import Figures, figures
from planner.replay.fleet import replay
from planner.replay.options import Options
from planner.replay.traffic import Traffic
from planner.traces.access import arrived_s
from planner.traces.shape import TraceRequest


class PoolPlan(msgspec.Struct, frozen=True):
    """One pool before and after; None: it is not there then. `notes` say what the comparison leaves out."""

    pool: str
    before: Figures | None
    after: Figures | None
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Attainment that the candidate adds, as a share of requests; for the class that fares worst by it."""
        before, after = self.before, self.after
        if before is None or after is None:
            return 0.0
        known = [name for name in before.classes if name in after.classes]
        return min((after.classes[name].attainment - before.classes[name].attainment for name in known), default=0.0)


class Plan(msgspec.Struct, frozen=True):
    """`requests` counted in the `span_s` seconds that were looked at."""

    pools: tuple[PoolPlan, ...]
    requests: int
    span_s: float
    blocks: bool


def plan(before: Mapping[str, Case], after: Mapping[str, Case], lately: Recent, seed: int = 0) -> Plan:
    """Replay every pool as it is and as it would be. Both are judged by the promises now in force."""
    pools = []
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        known = one or other
        assert known is not None
        traffic = lately.requests(known.models)
        if not traffic:
            pools.append(PoolPlan(name, None, None, ("nothing was asked of it",)))
            continue
        was = None if one is None else _run(one, one, traffic, lately, seed)
        would = None if other is None else _run(other, one or other, traffic, lately, seed)
        pools.append(PoolPlan(name, was, would, _notes(one, other)))
    counted = [each for each in map(arrived_s, lately.lines) if each >= lately.from_s]
    return Plan(tuple(pools), len(counted), max(counted, default=lately.from_s) - lately.from_s, lately.blocks)


def _run(case: Case, promises: Case, requests: Sequence[TraceRequest], lately: Recent, seed: int) -> Figures:
    options = Options(seed, standard=promises.standard, classes=promises.classes)
    arrivals = Traffic(arrivals=requests)
    run = replay(case.fleet, arrivals, case.policy(), case.admission(), options, case.limits, case.shares)
    return figures(run, lately.warmup_s)


def _notes(before: Case | None, after: Case | None) -> tuple[str, ...]:
    notes = list((after or before).assumed)  # type: ignore[union-attr]
    if before is not None and after is not None:
        if (before.classes, before.standard) != (after.classes, after.standard):
            notes.append("service classes differ: both are judged by those now in force")
        if before.models != after.models:
            notes.append("it serves other models then: both are given the requests for those it serves now")
    return tuple(notes)
