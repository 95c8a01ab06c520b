"""What is done with a trace before it is replayed: faster or slower, a part of it, several as one with classes and
tenants. Pure: requests in, requests out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from planner.traces.shape import PART_BITS, TRACE_BITS, TraceRequest

MOST_PARTS = 1 << PART_BITS


class Part(msgspec.Struct, frozen=True):
    """One trace of a mix. None leaves what the trace says.

    rate     how much faster its requests come than recorded
    from_s, to_s  only those recorded in this span; it becomes the beginning
    """

    requests: Sequence[TraceRequest]
    rate: float = 1.0
    from_s: float = 0.0
    to_s: float | None = None
    slo: str | None = None
    tenant: str | None = None
    priority: int | None = None


def sliced(requests: Iterable[TraceRequest], from_s: float = 0.0, to_s: float | None = None) -> list[TraceRequest]:
    """Those that came from `from_s` on and before `to_s`, counted from there. Sessions go with their first request."""
    kept: list[TraceRequest] = []
    sessions: set[str] = set()
    for one in requests:
        if one.think_s is not None:
            if one.session in sessions:
                kept.append(one)
        elif one.arrival_s >= from_s and (to_s is None or one.arrival_s < to_s):
            if one.session:
                sessions.add(one.session)
            kept.append(msgspec.structs.replace(one, arrival_s=one.arrival_s - from_s))
        else:
            sessions.discard(one.session)
    return kept


def scaled(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """`rate` times as many a second, in the same order. Lengths, and the pauses within sessions, stay. ValueError."""
    if not 0 < rate < inf:
        raise ValueError(f"a rate is a number above 0, not {rate}")
    return [msgspec.structs.replace(one, arrival_s=one.arrival_s / rate) for one in requests]


def mixed(parts: Sequence[Part]) -> list[TraceRequest]:
    """All parts at once, in order of arrival. Nothing is shared between parts, whatever their ids. ValueError."""
    if len(parts) > MOST_PARTS:
        raise ValueError(f"a mix has at most {MOST_PARTS} parts, not {len(parts)}")
    together: list[TraceRequest] = []
    for number, part in enumerate(parts):
        members = scaled(sliced(part.requests, part.from_s, part.to_s), part.rate)
        together += [_of_part(one, number, part) for one in members]
    return sorted(together, key=lambda one: one.arrival_s)


def _of_part(one: TraceRequest, number: int, part: Part) -> TraceRequest:
    offset = number << TRACE_BITS
    return msgspec.structs.replace(
        one,
        blocks=tuple(each + offset for each in one.blocks),
        session=f"{number}/{one.session}" if one.session else "",
        slo=one.slo if part.slo is None else part.slo,
        tenant=one.tenant if part.tenant is None else part.tenant,
        priority=one.priority if part.priority is None else part.priority,
    )
