"""The gateway's own access log (gateway/account.py): JSON lines, one per request. Replays what it was asked.

A log says when, how long, who and for which model, but not what prompts had in common, unless the gateway was told to
log `blocks` (docs/replay.md). Without them nothing is cached in the replay: compare policies by load then, not by hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from planner.traces.shape import TraceRequest, parsed

SHORTEST_OUTPUT = 1


class _Line(msgspec.Struct):
    time: float
    status: int
    id: str = ""
    tenant: str = ""
    model: str = ""
    received_us: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    slo: str = ""
    session: str = ""
    priority: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512


def access(lines: Iterable[bytes], name: str = "trace", model: str | None = None) -> Iterator[TraceRequest]:
    """Requests in order of arrival, from the first one's moment on; those whose lengths the log does not know (refused
    at the door, broken before the engine spoke) are passed over. `model`: only those for it.

    Lines are written when requests end, so all of them are read before the first is given out.
    """
    rows = [
        row
        for _, row in parsed(_Line, lines, name)
        if row.prompt_tokens and (model is None or row.model == model) and row.status < 400
    ]
    rows.sort(key=_arrived_s)
    begin_s = _arrived_s(rows[0]) if rows else 0.0
    for row in rows:
        yield TraceRequest(
            _arrived_s(row) - begin_s,
            row.prompt_tokens or 1,
            max(SHORTEST_OUTPUT, row.completion_tokens or 0),
            row.blocks,
            row.block_tokens,
            session=row.session,
            tenant=row.tenant,
            slo=row.slo,
            priority=row.priority,
        )


def _arrived_s(row: _Line) -> float:
    return row.time + (row.received_us or 0) / 1e6
