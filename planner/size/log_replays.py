"""Reads the access log for `penstock size --from`, and shows a progress bar for the replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.plan.config_to_replay import Assumptions, cases
from planner.process_map import available_cores
from planner.progress_bar import progress_rows
from planner.replay.argument_parsing import ArgumentError, parse_seconds
from planner.size.finalist import Finalist
from planner.size.finalist_replays import known_model, replay_finalists
from planner.size.pareto_front import FleetPoint
from planner.size.plan_draft import SizingError
from planner.size.plan_files import POOL, Emission, emit
from planner.traces import TraceError, TraceRequest, read_trace, slice_span

ConfigReader = Callable[[str], Mapping[str, Any]]
"""A function that reads the text of a gateway.yaml.

It returns the configuration as plain values with all defaults.
"""


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
