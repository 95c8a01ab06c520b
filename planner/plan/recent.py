"""The end of a gateway's access log as traffic: what was asked of one pool in the last minutes.

Lives here: how far back, and what is made of requests that were refused. Not here: the log's format
(planner/traces/access.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from planner.traces.access import Line, arrived_s, request_of
from planner.traces.shape import TraceError, TraceRequest, lines_of, parsed

TAIL_BYTES = 256 << 20
"""So much of a log is read at most, from its end."""

SHED, USUAL_TOKENS = 429, 256


class Recent(msgspec.Struct, frozen=True):
    """The lines of a log that matter, in order of arrival.

    begins_s, from_s  Unix time; requests that came between them warm caches and do not count
    """

    lines: Sequence[Line]
    begins_s: float
    from_s: float

    @property
    def blocks(self) -> bool:
        """Whether the log tells which blocks prompts had in common."""
        return any(line.blocks for line in self.lines)

    @property
    def warmup_s(self) -> float:
        """How long requests come before those that count, seconds."""
        return self.from_s - self.begins_s

    def requests(self, models: Collection[str] | None) -> list[TraceRequest]:
        """Those for these models; None: for any. One that was refused is taken to have wanted an answer of the usual
        length; one that failed for another reason is passed over."""
        wanted = [line for line in self.lines if models is None or line.model in models]
        lengths = [line.completion_tokens for line in wanted if line.completion_tokens]
        usual = round(median(lengths)) if lengths else USUAL_TOKENS
        found = [request_of(line, self.begins_s, usual if line.status == SHED else None) for line in wanted]
        return [each for each in found if each.input_tokens]


def recent(path: Path, last_s: float) -> Recent:
    """The last `last_s` seconds of a log, and as much before them to begin with. Raises TraceError."""
    with lines_of(path) as lines:
        source = lines if path.suffix == ".gz" else _tail(path)
        found = [row for _, row in parsed(Line, source, str(path)) if row.status < 400 or row.status == SHED]
    if not found:
        raise TraceError(f"{path}: no request in it")
    from_s = max(map(arrived_s, found)) - last_s
    found = sorted((row for row in found if arrived_s(row) >= from_s - last_s), key=arrived_s)
    begins_s = arrived_s(found[0])
    return Recent(found, begins_s, max(from_s, begins_s))


def _tail(path: Path) -> Iterator[bytes]:
    """The last lines of a file, whole ones."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size > TAIL_BYTES:
            file.seek(size - TAIL_BYTES)
            file.readline()
        for line in file:
            if line.endswith(b"\n"):  # the last one may be half written
                yield line
