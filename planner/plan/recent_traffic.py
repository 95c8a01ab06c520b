"""Reads the last minutes of a gateway's access log, as the requests of one pool.

This module decides how far back to read, and what to assume about refused requests. The format of
the log is in planner/traces/access_log.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import median

import msgspec

from planner.traces.access_log import LoggedRequest, arrived_s, request_of
from planner.traces.recorded_request import TraceRequest
from planner.traces.trace_lines import TraceError, open_lines, parse_lines

TAIL_BYTES = 256 << 20
"""Maximum bytes of an access log that are read, counted from its end."""

SHED, USUAL_TOKENS = 429, 256


class RecentTraffic(msgspec.Struct, frozen=True):
    """The last requests of an access log, in order of arrival.

    Requests between `begins_s` and `from_s` fill the caches of a replay, and are not counted in its
    results.

    lines     the log lines
    begins_s  Unix time from which requests are replayed
    from_s    Unix time from which requests are counted
    until_s   Unix time until which requests are counted; later ones only keep engines busy
    """

    lines: Sequence[LoggedRequest]
    begins_s: float
    from_s: float
    until_s: float = inf

    @property
    def blocks(self) -> bool:
        return any(line.blocks for line in self.lines)

    @property
    def warmup_s(self) -> float:
        """Return the seconds of traffic before the counted requests, which only fills caches."""
        return self.from_s - self.begins_s

    def counts(self, arrived_s: float) -> bool:
        """Return whether a request that arrived at this Unix time is counted."""
        return self.from_s <= arrived_s < self.until_s

    def requests(self, models: Collection[str] | None) -> list[TraceRequest]:
        """Return the recent requests for these models. With None, return all requests."""
        return [request for _, request in self.pairs(models)]

    def pairs(self, models: Collection[str] | None) -> list[tuple[LoggedRequest, TraceRequest]]:
        """Return (log line, request to replay) for each recent request for these models.

        models  names of the models; None: all

        The length of a refused request's answer is assumed to be the median. A request that failed
        for another reason is left out.
        """
        lines = [line for line in self.lines if models is None or line.model in models]
        lengths = [line.completion_tokens for line in lines if line.completion_tokens]
        usual = round(median(lengths)) if lengths else USUAL_TOKENS
        pairs = [
            (line, request_of(line, self.begins_s, usual if line.status == SHED else None))
            for line in lines
        ]
        return [(line, request) for line, request in pairs if request.input_tokens]


def recent(path: Path, last_s: float, tail_bytes: int = TAIL_BYTES) -> RecentTraffic:
    """Read the requests of the last `last_s` seconds from an access log.

    Requests of an equally long time before them are read too, to fill the caches of a replay. At
    most the last `tail_bytes` of the log are read.

    Raises TraceError if the log cannot be read, or has no request in that time.
    """
    with open_lines(path) as lines:
        source = lines if path.suffix == ".gz" else _tail(path, tail_bytes)
        rows = [
            row
            for _, row in parse_lines(LoggedRequest, source, str(path))
            if row.status < 400 or row.status == SHED
        ]
    if not rows:
        raise TraceError(f"the access log {path} contains no request")
    from_s = max(map(arrived_s, rows)) - last_s
    rows = sorted((row for row in rows if arrived_s(row) >= from_s - last_s), key=arrived_s)
    begins_s = arrived_s(rows[0])
    return RecentTraffic(rows, begins_s, max(from_s, begins_s))


def _tail(path: Path, tail_bytes: int) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size > tail_bytes:
            file.seek(size - tail_bytes)
            file.readline()
        for line in file:
            if line.endswith(b"\n"):  # the last one may be incomplete
                yield line
