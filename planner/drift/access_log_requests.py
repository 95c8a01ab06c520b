"""Reads the requests of some models from an access log, so that drift can be detected in them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from planner.traces import (
    TraceRequest,
    looks_like,
    open_lines,
    read_access,
    read_trace,
)


def read_log(path: Path, models: Collection[str] | None) -> tuple[float, list[TraceRequest]]:
    """Return the requests of an access log or trace by arrival, and the time of the first one.

    For an access log, the time is Unix time. For a trace, it is 0, because its times are relative.
    A trace has requests for one model. Raises TraceError if the file cannot be read.
    """
    is_log = path.suffix not in (".yaml", ".yml") and looks_like(path) == "access"
    if not is_log:
        return 0.0, sorted(read_trace(path), key=lambda request: request.arrival_s)
    with open_lines(path) as lines:
        return read_access(lines, str(path), models)
