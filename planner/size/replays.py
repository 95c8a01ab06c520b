"""Reading of the log in `penstock size --from`, and a progress bar for the replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from planner.replay.arguments import ArgumentError, parse_seconds
from planner.size.draft import FleetPlan, SizingError
from planner.size.finalist import Finalist
from planner.size.finalists import replay_finalists
from planner.size.front import FleetPoint
from planner.traces import TraceError, TraceRequest, read_trace, slice_span


def replay_log(
    plan: FleetPlan, points: Sequence[FleetPoint], log: Path, last: str, is_quiet: bool
) -> list[Finalist]:
    """Replay the best fleets on a log and return their results, best attainment first.

    Raises SizingError if the log has no usable request.
    """
    requests = _requests(log, last)
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        return replay_finalists(plan, points, requests)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replay", total=1.0)
        return replay_finalists(
            plan,
            points,
            requests,
            lambda name, share: bar.update(task, description=name, completed=share),
        )


def _requests(log: Path, last: str) -> list[TraceRequest]:
    try:
        requests = read_trace(log)
        end_s = max((request.arrival_s for request in requests), default=0.0)
        requests = slice_span(requests, max(0.0, end_s - parse_seconds(last)))
    except (TraceError, ArgumentError) as error:
        raise SizingError(str(error)) from None
    if not requests:
        raise SizingError(f"{log} has no request in the last {last}")
    return requests
