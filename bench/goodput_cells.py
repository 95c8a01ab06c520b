"""The workloads of the goodput benchmark, and its cells. A cell is one policy on one workload.

A cell contains all of its parameters, so that it can be measured in any process. bench/goodput.py
runs the cells, and bench/goodput_table.py prints the results.

The slices of recorded traffic are not those on which the policy's weights were tuned (see
docs/goodput.md).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import msgspec

from planner.replay import ReplayOptions, ReplayRun, Traffic, preset, replay, traffic, users
from planner.replay.capacity_search import capacity
from planner.replay.fleet_spec import FleetSpec
from planner.replay.results import ReplayFigures, figures
from planner.traces.b2b import b2b
from planner.traces.mix import MixPart, mix_parts, scale_rate, slice_span
from planner.traces.recorded_request import TraceRequest
from planner.traces.trace_file import read_trace
from policies import policy_registry
from policies.admission_registry import build_admission
from policies.routing_types import STANDARD, Slo

AGENT = Slo("agent", 10.0, 0.1)
CLASSES = {
    "interactive": Slo("interactive", 2.0, 0.06, 2.0),
    "standard": STANDARD,
    "batch": Slo("batch", 30.0, 0.2, 0.5),
}
GRID_S = 3.0
"""Resolution in seconds of the timestamps in Mooncake's traces.

Requests with equal timestamps are spread over this time, differently for each seed.
"""

MIX_B2B_RATE = 4.0
B2B_S, WARM = 400.0, 0.15
IDLE = 8.0
"""Number by which the first load to try is divided to get a load at which the fleet counts as idle.
"""

RELATIVE = 0.95
"""Attainment target above which a target is relative to the attainment of the idle fleet.

Some prompts are too long to meet their budgets on any fleet. A target of 0.99 therefore means 0.99
times the attainment of the idle fleet.
"""

TROUBLES = {
    "": ReplayOptions(),
    "stale": ReplayOptions(scrape_s=5.0, scrape_age_s=5.0),
    "lost": ReplayOptions(lost_events=0.33),
}
TENANT_RATE = 0.8


class Cell(msgspec.Struct, frozen=True):
    """One measurement of the goodput benchmark: a policy, a workload, a load and their parameters.

    kind     "capacity" to find the highest load for each target, or "point" to measure one load
    load     requests per second or number of users; for a capacity, the first load to try
    targets  shares of requests that must meet their latency budgets, such as 0.9; targets above
             RELATIVE are relative to a fleet without load
    tpot_s   limit on the time per output token in seconds, instead of the service class's limit
    trouble  "stale": metrics are read every 5 s and are 5 s old; "lost": a third of the messages
             about caches is lost; "": there is no such trouble
    quick    whether to use only a third of the trace slice
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


class Measurement(msgspec.Struct, frozen=True):
    """The result of one cell (one policy on one workload).

    capacities  by target as text, such as "0.9": the highest load that met the target
    figures     results at the highest load that met the lowest target
    runs        number of simulations
    wall_s      seconds that the measurement took
    """

    cell: Cell
    capacities: dict[str, float]
    figures: dict[str, Any]
    runs: int
    wall_s: float


class TraceFolder(msgspec.Struct, frozen=True):
    folder: str


def measure(cell: Cell, traces: TraceFolder) -> Measurement:
    """Measure a cell and return its result. Equal cells give equal results, except `wall_s`."""
    started, by_load = perf_counter(), dict[float, ReplayFigures]()

    def attainment(load: float) -> float:
        if load not in by_load:
            by_load[load] = simulate(cell, load, traces)
        return by_load[load].attainment

    capacities = {}
    for target in cell.targets:
        share = target * attainment(cell.load / IDLE) if target > RELATIVE else target
        capacities[f"{target:g}"] = capacity(
            attainment, share, cell.load, 0.03, least=cell.load / IDLE
        ).load
    if not cell.targets:
        attainment(cell.load)
    aim = min(cell.targets, default=0.0)
    attaining = (load for load, figures in by_load.items() if figures.attainment >= aim)
    best = max(attaining, default=min(by_load))
    wall_s = perf_counter() - started
    return Measurement(cell, capacities, summarize(by_load[best], best), len(by_load), wall_s)


def simulate(cell: Cell, load: float, traces: TraceFolder) -> ReplayFigures:
    run, from_s, to_s = run_replay(cell, load, traces)
    return figures(run, from_s, to_s)


def run_replay(
    cell: Cell, load: float, traces: TraceFolder
) -> tuple[ReplayRun, float, float | None]:
    """Simulate a cell's traffic once at this load.

    Returns the run, and the period whose requests count, as (run, start, end). Times are in
    seconds; an end of None is the end of the run.
    """
    requests, span_s, horizon_s = build_traffic(cell, load, traces)
    standard = AGENT if cell.workload == "agents" else STANDARD
    if cell.tpot_s is not None:
        standard = msgspec.structs.replace(standard, tpot_s=cell.tpot_s)
    options = msgspec.structs.replace(
        TROUBLES[cell.trouble],
        seed=cell.seed,
        horizon_s=horizon_s,
        standard=standard,
        classes=CLASSES,
    )
    gate = build_admission(cell.admission, {}) if cell.admission else None
    run = replay(
        build_fleet(cell.fleet), requests, policy_registry.build(cell.policy, {}), gate, options
    )
    return run, WARM * span_s if horizon_s is None else 0.4 * horizon_s, horizon_s


def build_fleet(name: str) -> FleetSpec:
    """Return the simulated fleet of the goodput benchmark that has this name.

    With the suffix `:pairs`, a request can be split between any two engines: one computes the
    prompt, the other one generates the answer.
    """
    plain, _, _ = name.partition(":pairs")
    return (
        preset(name)
        if plain == name
        else msgspec.structs.replace(preset(plain), name=name, pairs=True)
    )


def build_traffic(
    cell: Cell, load: float, traces: TraceFolder
) -> tuple[Traffic, float, float | None]:
    """Return the traffic of one measurement at this load, as (traffic, duration in seconds, end).

    The end is the time at which users stop sending (closed loop). It is None if requests have fixed
    arrival times (open loop).
    """
    share = 1 / 3 if cell.quick else 1.0
    if cell.workload == "agents":
        horizon_s = 1500.0 * (0.6 if cell.quick else 1.0)
        return (
            users(sessions(traces.folder), max(1, round(load)), cell.seed, 300.0),
            horizon_s,
            horizon_s,
        )
    if cell.workload == "b2b":
        return traffic(b2b(load, B2B_S * share, cell.seed)), B2B_S * share, None
    if cell.workload == "mix":
        return (
            traffic(scale_rate(mix(traces.folder, cell.seed, share), load)),
            900 * share / load,
            None,
        )
    if cell.workload == "tenants":
        return (
            traffic(tenants(traces.folder, cell.seed, share, load)),
            1200 * share / TENANT_RATE,
            None,
        )
    requests, span_s = recorded_slice(cell.workload, traces.folder, cell.seed, share)
    return traffic(scale_rate(requests, load)), span_s / load, None


def sessions(folder: str) -> tuple[TraceRequest, ...]:
    return _trace(folder, "claude_code_sessions_a.jsonl.gz")


@cache
def _trace(folder: str, name: str) -> tuple[TraceRequest, ...]:
    return tuple(read_trace(Path(folder) / name))


SLICES = {
    # Name: file, start, end, resolution of timestamps. The weights were chosen on the slices
    # conversation 0-1200 s and azure 0-900 s.
    "conversation": ("mooncake_conversation.jsonl.gz", 1800.0, 3000.0, GRID_S),
    "conversation_tuned": ("mooncake_conversation.jsonl.gz", 0.0, 1200.0, GRID_S),
    "azure": ("azure_2023_conv.csv.gz", 1800.0, 2700.0, 1.0),
}


def recorded_slice(
    name: str, folder: str, seed: int, share: float
) -> tuple[list[TraceRequest], float]:
    """Return the requests of a slice of a recorded trace, and the slice's length in seconds.

    name    name of the trace
    folder  folder of the traces
    seed    random seed; it moves arrivals by up to half the resolution of recorded times
    share   length of the slice, as a fraction of the full one
    """
    file, from_s, to_s, grid_s = SLICES[name]
    to_s = from_s + (to_s - from_s) * share
    rng, span_s = Random(f"{name} {seed}"), to_s - from_s
    moved = [
        msgspec.structs.replace(
            item,
            arrival_s=min(span_s, max(0.0, item.arrival_s + rng.uniform(-grid_s / 2, grid_s / 2))),
        )
        for item in slice_span(_trace(folder, file), from_s, to_s)
    ]
    return sorted(moved, key=lambda item: item.arrival_s), span_s


def mix(folder: str, seed: int, share: float) -> list[TraceRequest]:
    """Return a mix of three recorded traces: conversations, business requests and Azure's chat.

    The requests come from two tenants and have three service classes.
    """
    chat, _ = recorded_slice("azure", folder, seed, share)
    conversation, _ = recorded_slice("conversation", folder, seed, 0.75 * share)
    return mix_parts(
        [
            MixPart(conversation, 0.6, slo="standard", tenant="a"),
            MixPart(list(b2b(MIX_B2B_RATE, 900 * share, seed)), 1.0, slo="batch", tenant="b"),
            MixPart(chat, 1.0, slo="interactive", tenant="a"),
        ]
    )


def tenants(folder: str, seed: int, share: float, greed: float) -> list[TraceRequest]:
    """Return the requests of two tenants, mixed by time.

    Both hold conversations of the Mooncake trace. Tenant "greedy" sends `greed` times as much as
    tenant "a"; it stops earlier if the trace has too few requests.
    """
    mine, span_s = recorded_slice("conversation", folder, seed, share)
    other = slice_span(_trace(folder, SLICES["conversation"][0]), 0.0, span_s * greed)
    return mix_parts(
        [
            MixPart(mine, TENANT_RATE, tenant="a"),
            MixPart(other, TENANT_RATE * greed, tenant="greedy"),
        ]
    )


def summarize(figures: ReplayFigures, load: float) -> dict[str, Any]:
    return {
        "load": load,
        "attainment": figures.attainment,
        "goodput": figures.goodput,
        "token_goodput": figures.token_goodput,
        "hit_ratio": figures.hit_ratio,
        "of_ideal": figures.of_ideal,
        "imbalance": figures.imbalance,
        "ttft_p50": figures.ttft.p50 if figures.ttft else None,
        "ttft_p99": figures.ttft.p99 if figures.ttft else None,
        "tpot_p50": figures.tpot.p50 if figures.tpot else None,
        "long_kept": figures.long_kept,
        "wasted": figures.wasted,
        "ttft_error": figures.ttft_error,
        "ttft_error_p50": figures.ttft_error_p50,
        "pick_us": figures.pick_us,
        "offered": figures.offered,
        "worst_tenant": figures.worst_tenant,
        "refused": figures.ends.get("shed", 0) / max(1, figures.offered),
        "tenants": {
            name: [item.attainment, item.ttft_p50_s, item.ttft_p99_s]
            for name, item in figures.tenants.items()
        },
    }
