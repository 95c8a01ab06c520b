"""The gateway's own access log (gateway/account.py): JSON lines, one per request. Replays what it was asked.

A log says when, how long, who and for which model, but not what prompts had in common, unless the gateway was told to
log `blocks` (docs/replay.md). Without them nothing is cached in the replay: compare policies by load then, not by hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from planner.traces.shape import BlockId, Tokens, TraceRequest, parsed
from planner.words import BYTES_PER_TOKEN

_EVENTS_WITHOUT_TOKENS = 2
"""Events of a stream that bring no token: the role at its beginning or the usage at its end, and [DONE]."""


class Line(msgspec.Struct):
    """What a replay reads of an access line; its other fields are ignored. `time`: Unix time of the request's head."""

    time: float
    status: int
    id: str = ""
    tenant: str = ""
    model: str = ""
    received_us: int | None = None
    body_bytes: Annotated[int, Meta(ge=0)] = 0
    events: int = 0
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    slo: str = ""
    session: str = ""
    priority: int = 0
    blocks: tuple[BlockId, ...] = ()
    block_tokens: Annotated[int, Meta(ge=1)] = 512


def access(lines: Iterable[bytes], name: str = "trace", model: str | None = None) -> Iterator[TraceRequest]:
    """Requests in order of arrival, from the first one's moment on; those that were refused or broken are passed over.
    `model`: only those for it.

    Where an engine was not asked for usage, as in most streams, lengths are estimated: four bytes of body per token of
    the prompt, an event per token of the answer. Lines are written when requests end, so all of them are read before
    the first is given out.
    """
    rows = [
        row
        for _, row in parsed(Line, lines, name)
        if row.status < 400 and (model is None or row.model == model) and _prompt_tokens(row)
    ]
    rows.sort(key=arrived_s)
    begin_s = arrived_s(rows[0]) if rows else 0.0
    for row in rows:
        yield request_of(row, begin_s)


def request_of(row: Line, begin_s: float, output_tokens: int | None = None) -> TraceRequest:
    """One line as a request, `begin_s` being Unix time; `output_tokens` where the line cannot tell them."""
    told = row.events - _EVENTS_WITHOUT_TOKENS if row.completion_tokens is None else row.completion_tokens
    return TraceRequest(
        arrived_s(row) - begin_s,
        _prompt_tokens(row),
        max(1, told if output_tokens is None else output_tokens),
        row.blocks,
        row.block_tokens,
        session=row.session,
        tenant=row.tenant,
        slo=row.slo,
        priority=row.priority,
    )


def _prompt_tokens(row: Line) -> int:
    return row.body_bytes // BYTES_PER_TOKEN if row.prompt_tokens is None else row.prompt_tokens


def arrived_s(row: Line) -> float:
    """Unix time at which its last byte had come."""
    return row.time + (row.received_us or 0) / 1e6
