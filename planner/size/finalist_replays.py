"""Replays the best fleets of a sizing on recorded traffic, each with its own gateway.yaml.

The estimate of a plan assumes steady batches. A replay also has arrivals, queues and prefix caches.
Fleets are compared by attainment, the share of requests served within the promised latencies.
Policy, admission, limits and health checks are those of the plan's gateway.yaml.
finalist_fleets.py chooses the fleets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planner.plan.config_to_replay import Assumptions, PoolCase, cases
from planner.process_map import ReportShare, WorkerError, available_cores, map_in_processes
from planner.progress_bar import progress_rows
from planner.replay.argument_parsing import ArgumentError, parse_seconds
from planner.replay.fleet_sim import replay
from planner.replay.fleet_spec import FleetSpec
from planner.replay.results import ReplayFigures, RequestEnd, figures
from planner.replay.traffic import traffic
from planner.size.finalist_fleets import fleets_to_replay, known_model
from planner.size.finalist_result import Finalist
from planner.size.pareto_front import FleetPoint
from planner.size.plan_draft import FleetPlan, SizingError
from planner.size.plan_files import POOL, Emission, emit
from planner.traces import TraceError, TraceRequest, read_trace, slice_span
from policies.routing_types import Role

SPLIT_POLICY = "priced"

ConfigReader = Callable[[str], Mapping[str, Any]]
"""A function that reads the text of a gateway.yaml.

It returns the configuration as plain values with all defaults.
"""


class _FinalistReplay(msgspec.Struct, frozen=True):
    # The input of a process that replays one fleet.
    plan: FleetPlan
    case: PoolCase
    requests: Sequence[TraceRequest]


def replay_log(
    emission: Emission,
    points: Sequence[FleetPoint],
    log: Path,
    last: str,
    read_config: ConfigReader,
    is_quiet: bool,
) -> list[Finalist]:
    """Replay the best fleets on a log, and return their results, best attainment first.

    As many replays run at a time as there are cores. Attainment is the share of requests that are
    served within their latency promises.

    emission     the plan, whose gateway.yaml gives policies and limits
    points       the alternatives
    log          the access log or trace
    last         how much of the end of the log to replay, such as 60m
    read_config  function that reads the text of a gateway.yaml
    is_quiet     whether to show no progress bar

    Raises SizingError if the log has no usable request, or if no mock engine can imitate the plan's
    engines. Raises WorkerError if the process of a replay ends without a result.
    """
    plan = emission.plan
    assumed = Assumptions(known_model(plan), plan.hardware.gpu.name)
    requests = _requests(log, last)
    case = cases(read_config(emit("gateway", emission)), assumed)[POOL]
    with progress_rows(is_quiet) as show_progress:
        return replay_finalists(plan, case, points, requests, show_progress, available_cores())


def _requests(log: Path, last: str) -> list[TraceRequest]:
    try:
        requests = read_trace(log)
        end_s = max((request.arrival_s for request in requests), default=0.0)
        requests = slice_span(requests, max(0.0, end_s - parse_seconds(last)))
    except (TraceError, ArgumentError) as error:
        raise SizingError(str(error)) from None
    if not requests:
        raise SizingError(f"the log {log} contains no request of the last {last}")
    return requests


def replay_finalists(
    plan: FleetPlan,
    case: PoolCase,
    points: Sequence[FleetPoint],
    requests: Sequence[TraceRequest],
    on_progress: Callable[[str, float], None],
    processes: int = 1,
) -> list[Finalist]:
    """Replay the planned fleet and its best alternatives, and return their results.

    Alternatives are the best other points, and the plan with separate prefill and decode engines.

    case         the pool of the plan's gateway.yaml. The pools of alternatives differ from it in
                 their endpoints, and in the policy if they split requests
    on_progress  called with the name of a fleet and the share of its requests that have ended
    processes    maximum number of replays at a time, each in its own process if there are several.
                 The results do not depend on it

    Raises WorkerError if a process ends without a result.
    """
    replays = []
    for fleet in fleets_to_replay(plan, case.fleet, points):
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


def _finalist(plan: FleetPlan, fleet: FleetSpec, result: ReplayFigures) -> Finalist:
    gpus = sum(kind.layout.gpus * kind.count for kind in fleet.kinds)
    return Finalist(
        *(fleet.name, gpus, gpus * plan.hardware.price_hour, result.attainment),
        result.ends.get(RequestEnd.SHED, 0) / max(1, result.offered),
        None if result.ttft is None else result.ttft.p95,
        None if result.tpot is None else result.tpot.p95,
        result.hit_ratio,
    )
