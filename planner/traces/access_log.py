"""Reads the gateway's own access log: JSON lines, one per request.

A log has times, lengths, tenant and model. It shows shared prefixes only if the gateway logs
`blocks` (docs/replay.md). Without them, nothing is cached in a replay, so compare loads and not
cache hits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from planner.traces.recorded_request import BlockId, Tokens, TraceRequest
from planner.traces.trace_lines import parse_lines
from policies.sizing.workload_drift import request_tokens


class LoggedRequest(msgspec.Struct):
    """The fields of an access log line that a replay needs.

    time               Unix time at which the request's headers were received
    status             HTTP status of the response
    endpoint           name of the endpoint that served it
    received_us        microseconds from `time` until the request's last byte was received; None:
                       unknown
    body_bytes         bytes of its body
    events             number of events of the streamed answer
    prompt_tokens      tokens of the prompt, as the engine reported; None: not reported
    completion_tokens  tokens of the answer, as the engine reported; None: not reported
    first_token_us     microseconds from `time` to the first token
    last_us            microseconds from `time` to the end of the response
    slo                name of its service class
    slo_outcome        "met" if it met its latency budgets, or what it missed; empty: unknown
    session_id         id of its session; 0: none
    blocks             ids of the prompt's blocks; empty: the gateway does not log them
    block_tokens       tokens per block
    """

    time: float
    status: int
    id: str = ""
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    received_us: int | None = None
    body_bytes: Annotated[int, Meta(ge=0)] = 0
    events: int = 0
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    first_token_us: int | None = None
    last_us: int | None = None
    slo: str = ""
    slo_outcome: str = ""
    session_id: Annotated[int, Meta(ge=0)] = 0
    priority: int = 0
    blocks: tuple[BlockId, ...] = ()
    block_tokens: Annotated[int, Meta(ge=1)] = 512


def access(
    lines: Iterable[bytes], name: str = "trace", model: str | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of the gateway's own access log, in order of arrival.

    Times are relative to the first request. Refused and failed requests are left out. If `model` is
    given, requests for other models are left out too.

    If an engine reported no usage, as in most streams, lengths are estimated: one prompt token per
    four bytes of body, and one answer token per event. Lines are written when requests end, so all
    lines are read before the first request is yielded.
    """
    yield from read_access(lines, name, None if model is None else (model,))[1]


def read_access(
    lines: Iterable[bytes], name: str, models: Collection[str] | None
) -> tuple[float, list[TraceRequest]]:
    """Return the Unix time of the first request of an access log, and the requests.

    `models` are the models whose requests count; None: all. The function access() describes which
    requests are left out.
    """
    rows = [
        row
        for _, row in parse_lines(LoggedRequest, lines, name)
        if row.status < 400 and (models is None or row.model in models) and _tokens(row)[0]
    ]
    rows.sort(key=arrived_s)
    begin_s = arrived_s(rows[0]) if rows else 0.0
    return begin_s, [request_of(row, begin_s) for row in rows]


def request_of(
    row: LoggedRequest, begin_s: float, output_tokens: int | None = None
) -> TraceRequest:
    """Convert one line of an access log to a request, with times relative to `begin_s` (Unix time).

    output_tokens  length of the answer to assume instead of the logged one
    """
    prompt, output = _tokens(row)
    return TraceRequest(
        arrived_s(row) - begin_s,
        prompt,
        output if output_tokens is None else max(1, output_tokens),
        row.blocks,
        row.block_tokens,
        session=f"{row.session_id:x}" if row.session_id else "",
        tenant=row.tenant,
        slo=row.slo,
        priority=row.priority,
    )


def _tokens(row: LoggedRequest) -> tuple[int, int]:
    return request_tokens(row.prompt_tokens, row.body_bytes, row.completion_tokens, row.events)


def arrived_s(row: LoggedRequest) -> float:
    """Return the Unix time at which the request's last byte was received."""
    return row.time + (row.received_us or 0) / 1e6
