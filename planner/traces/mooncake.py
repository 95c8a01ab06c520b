"""Reads Mooncake's traces: JSON lines with chained ids of 512-token blocks.

Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import msgspec

from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import BlockId, Tokens, TraceRequest
from planner.traces.trace_lines import TraceError, open_lines, parse_lines

GRID_S = 3.0
"""Resolution of Mooncake's timestamps in seconds.

Requests of the same time are spread over this span. Sent unchanged, they would come in artificial
batches.
"""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]


def read_mooncake(
    path: Path, limit: int | None = None, speed: float = 1.0
) -> Iterator[TraceRequest]:
    """Yield the first `limit` requests of a Mooncake trace file (.jsonl or .jsonl.gz).

    The requests come in order of arrival, `speed` times as fast as recorded. Raises TraceError if
    the file cannot be read.
    """
    with open_lines(path) as lines:
        for request in islice(mooncake(lines, str(path)), limit):
            yield msgspec.structs.replace(request, arrival_s=request.arrival_s / speed)


def mooncake(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """Yield the requests in Mooncake JSON lines.

    Requests of the same 3 s have one timestamp; their arrivals are spread evenly over the 3 s.
    """
    for timestamp_ms, batch in groupby(_rows(lines, name), key=lambda row: row.timestamp):
        members = list(batch)
        for index, row in enumerate(members):
            arrival_s = timestamp_ms / 1e3 + GRID_S * index / len(members)
            yield TraceRequest(arrival_s, row.input_length, max(row.output_length, 1), row.hash_ids)


def _rows(lines: Iterable[bytes], name: str) -> Iterator[_Line]:
    for number, row in parse_lines(_Line, lines, name):
        if not 0 < row.input_length <= len(row.hash_ids) * BLOCK_TOKENS:
            raise TraceError(
                f"{name}:{number}: input_length is {row.input_length} tokens, which do not fit "
                f"the {len(row.hash_ids)} blocks of 512 tokens in hash_ids"
            )
        yield row
