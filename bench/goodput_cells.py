"""What the goodput bench measures: workloads, and cells, each of which is one figure of one policy on one workload.

A cell is a value that a process of its own can measure from nothing; bench/goodput.py runs them, bench/goodput_table.py lays the
results out. Slices of recorded traffic are held out: weights were chosen on others (docs/goodput.md says which).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import msgspec

from planner.replay import ReplayOptions, ReplayRun, Traffic, preset, replay, traffic, users
from planner.replay.capacity import capacity
from planner.replay.results import ReplayFigures, figures
from planner.replay.spec import FleetSpec
from planner.traces.b2b import b2b
from planner.traces.mix import MixPart, mix_parts, scale_rate, slice_span
from planner.traces.shape import TraceRequest
from planner.traces.source import read_trace
from policies import registry
from policies.admission_registry import build_admission
from policies.model import STANDARD, Slo

AGENT = Slo("agent", 10.0, 0.1)
CLASSES = {
    "interactive": Slo("interactive", 2.0, 0.06, 2.0),
    "standard": STANDARD,
    "batch": Slo("batch", 30.0, 0.2, 0.5),
}
GRID_S = 3.0  # Mooncake's timestamps: every seed spreads the batches anew
MIX_B2B_RATE = 4.0
B2B_S, WARM = 400.0, 0.15
IDLE = 8.0  # a fleet at the starting load over so much is idle
RELATIVE = 0.95  # targets above it are shares of what an idle fleet attains
TROUBLES = {"": ReplayOptions(), "stale": ReplayOptions(scrape_s=5.0, scrape_age_s=5.0), "lost": ReplayOptions(lost_events=0.33)}
TENANT_RATE = 0.8


class Cell(msgspec.Struct, frozen=True):
    """One thing to measure. `load` is a rate or a number of users; with `targets` the capacity is looked for from it.

    kind       capacity: the loads at which attainment crosses the targets; point: the figures at one load
    targets    shares of requests in time; 0.99 is of those that an idle fleet serves in time: some prompts are too long
    tpot_s     replaces the class's budget where it is set
    trouble    stale: metrics are read every 5 s and 5 s old; lost: a third of cache events never comes
    quick      a slice of a third of the length
    """

    kind: str
    workload: str
    policy: str
    fleet: str = "F1"
    admission: str = ""
    load: float = 1.0
    targets: tuple[float, ...] = ()
    seed: int = 1
    tpot_s: float | None = None
    quick: bool = False
    table: str = ""
    trouble: str = ""


class Reading(msgspec.Struct, frozen=True):
    """What was measured of a cell: capacities by target as text, the figures at the highest load that held, cost."""

    cell: Cell
    capacities: dict[str, float]
    figures: dict[str, Any]
    runs: int
    wall_s: float


class Data(msgspec.Struct, frozen=True):
    """Where the traces lie."""

    folder: str


def measure(cell: Cell, data: Data) -> Reading:
    """Run what the cell needs. Deterministic but for wall times."""
    began, kept = perf_counter(), dict[float, ReplayFigures]()

    def attainment(load: float) -> float:
        if load not in kept:
            kept[load] = at(cell, load, data)
        return kept[load].attainment

    capacities = {}
    for target in cell.targets:
        share = target * attainment(cell.load / IDLE) if target > RELATIVE else target
        capacities[f"{target:g}"] = capacity(attainment, share, cell.load, 0.03, least=cell.load / IDLE).load
    if not cell.targets:
        attainment(cell.load)
    aim = min(cell.targets, default=0.0)
    best = max((load for load, seen in kept.items() if seen.attainment >= aim), default=min(kept))
    return Reading(cell, capacities, told(kept[best], best), len(kept), perf_counter() - began)


def at(cell: Cell, load: float, data: Data) -> ReplayFigures:
    """The figures of one replay."""
    run, from_s, to_s = played(cell, load, data)
    return figures(run, from_s, to_s)


def played(cell: Cell, load: float, data: Data) -> tuple[ReplayRun, float, float | None]:
    """One replay, and between which moments its requests count."""
    said, span_s, horizon_s = offered(cell, load, data)
    standard = AGENT if cell.workload == "agents" else STANDARD
    if cell.tpot_s is not None:
        standard = msgspec.structs.replace(standard, tpot_s=cell.tpot_s)
    options = msgspec.structs.replace(
        TROUBLES[cell.trouble], seed=cell.seed, horizon_s=horizon_s, standard=standard, classes=CLASSES
    )
    gate = build_admission(cell.admission, {}) if cell.admission else None
    run = replay(fleet_of(cell.fleet), said, registry.build(cell.policy, {}), gate, options)
    return run, WARM * span_s if horizon_s is None else 0.4 * horizon_s, horizon_s


def fleet_of(name: str) -> FleetSpec:
    """A preset; `F1:pairs` may also split between groups that do both."""
    plain, _, _ = name.partition(":pairs")
    return preset(name) if plain == name else msgspec.structs.replace(preset(plain), name=name, pairs=True)


def offered(cell: Cell, load: float, data: Data) -> tuple[Traffic, float, float | None]:
    """The traffic at a load, the seconds over which it comes, and where a closed loop is cut."""
    share = 1 / 3 if cell.quick else 1.0
    if cell.workload == "agents":
        horizon_s = 1500.0 * (0.6 if cell.quick else 1.0)
        return users(sessions(data.folder), max(1, round(load)), cell.seed, 300.0), horizon_s, horizon_s
    if cell.workload == "b2b":
        return traffic(b2b(load, B2B_S * share, cell.seed)), B2B_S * share, None
    if cell.workload == "mix":
        return traffic(scale_rate(mix(data.folder, cell.seed, share), load)), 900 * share / load, None
    if cell.workload == "tenants":
        return traffic(tenants(data.folder, cell.seed, share, load)), 1200 * share / TENANT_RATE, None
    requests, span_s = recorded(cell.workload, data.folder, cell.seed, share)
    return traffic(scale_rate(requests, load)), span_s / load, None


def sessions(folder: str) -> tuple[TraceRequest, ...]:
    """Agent sessions, closed loop."""
    return _trace(folder, "claude_code_sessions_a.jsonl.gz")


@cache
def _trace(folder: str, name: str) -> tuple[TraceRequest, ...]:
    return tuple(read_trace(Path(folder) / name))


SLICES = {
    # name: file, from, to, grid: weights were chosen on conversation 0-1200 s and azure 0-900 s
    "conversation": ("mooncake_conversation.jsonl.gz", 1800.0, 3000.0, GRID_S),
    "conversation_tuned": ("mooncake_conversation.jsonl.gz", 0.0, 1200.0, GRID_S),
    "azure": ("azure_2023_conv.csv.gz", 1800.0, 2700.0, 1.0),
}


def recorded(name: str, folder: str, seed: int, share: float) -> tuple[list[TraceRequest], float]:
    """A slice of a recorded trace, its moments moved by up to half its grid, and its length in seconds."""
    file, from_s, to_s, grid_s = SLICES[name]
    to_s = from_s + (to_s - from_s) * share
    rng, span_s = Random(f"{name} {seed}"), to_s - from_s
    moved = [
        msgspec.structs.replace(
            one, arrival_s=min(span_s, max(0.0, one.arrival_s + rng.uniform(-grid_s / 2, grid_s / 2)))
        )
        for one in slice_span(_trace(folder, file), from_s, to_s)
    ]
    return sorted(moved, key=lambda one: one.arrival_s), span_s


def mix(folder: str, seed: int, share: float) -> list[TraceRequest]:
    """Conversation, B2B and Azure's chat at once: three classes, two tenants."""
    chat, _ = recorded("azure", folder, seed, share)
    talk, _ = recorded("conversation", folder, seed, 0.75 * share)
    return mix_parts(
        [
            MixPart(talk, 0.6, slo="standard", tenant="a"),
            MixPart(list(b2b(MIX_B2B_RATE, 900 * share, seed)), 1.0, slo="batch", tenant="b"),
            MixPart(chat, 1.0, slo="interactive", tenant="a"),
        ]
    )


def tenants(folder: str, seed: int, share: float, greed: float) -> list[TraceRequest]:
    """Two tenants with conversations; the other one asks for `greed` times as much for as long, or the trace lasts."""
    mine, span_s = recorded("conversation", folder, seed, share)
    other = slice_span(_trace(folder, SLICES["conversation"][0]), 0.0, span_s * greed)
    return mix_parts([MixPart(mine, TENANT_RATE, tenant="a"), MixPart(other, TENANT_RATE * greed, tenant="greedy")])


def told(seen: ReplayFigures, load: float) -> dict[str, Any]:
    """What of a run goes into the results."""
    return {
        "load": load,
        "attainment": seen.attainment,
        "goodput": seen.goodput,
        "token_goodput": seen.token_goodput,
        "hit_ratio": seen.hit_ratio,
        "of_ideal": seen.of_ideal,
        "imbalance": seen.imbalance,
        "ttft_p50": seen.ttft.p50 if seen.ttft else None,
        "ttft_p99": seen.ttft.p99 if seen.ttft else None,
        "tpot_p50": seen.tpot.p50 if seen.tpot else None,
        "long_kept": seen.long_kept,
        "wasted": seen.wasted,
        "ttft_error": seen.ttft_error,
        "ttft_error_p50": seen.ttft_error_p50,
        "pick_us": seen.pick_us,
        "offered": seen.offered,
        "worst_tenant": seen.worst_tenant,
        "refused": seen.ends.get("shed", 0) / max(1, seen.offered),
        "tenants": {name: [one.attainment, one.ttft_p50_s, one.ttft_p99_s] for name, one in seen.tenants.items()},
    }
