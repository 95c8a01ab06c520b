"""Changes traces before their replay: scales rates, cuts out periods, and mixes several traces.

The functions return new traces, and leave their arguments unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from planner.traces.recorded_request import PART_BITS, TRACE_BITS, TraceRequest

MOST_PARTS = 1 << PART_BITS


class MixPart(msgspec.Struct, frozen=True):
    """One trace of a mix, and the changes to make to it. None: no change.

    rate      arrival rate relative to the recorded rate
    from_s    beginning of the period of the recording to use, in seconds; it becomes the beginning
              of the trace
    to_s      end of that period; None: the end of the recording
    slo       service class that replaces the recorded one
    tenant    tenant that replaces the recorded one
    priority  priority that replaces the recorded one
    """

    requests: Sequence[TraceRequest]
    rate: float = 1.0
    from_s: float = 0.0
    to_s: float | None = None
    slo: str | None = None
    tenant: str | None = None
    priority: int | None = None


def slice_span(
    requests: Iterable[TraceRequest], from_s: float = 0.0, to_s: float | None = None
) -> list[TraceRequest]:
    """Return the requests of a trace that arrive in [from_s, to_s), with times relative to from_s.

    A session with think times is included completely if its first request arrives in that period.
    """
    selected: list[TraceRequest] = []
    sessions: set[str] = set()
    for request in requests:
        if request.think_s is not None:
            if request.session in sessions:
                selected.append(request)
        elif request.arrival_s >= from_s and (to_s is None or request.arrival_s < to_s):
            if request.session:
                sessions.add(request.session)
            selected.append(msgspec.structs.replace(request, arrival_s=request.arrival_s - from_s))
        else:
            sessions.discard(request.session)
    return selected


def scale_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the requests with `rate` times their arrival rate, in the same order.

    Lengths, and pauses within sessions, do not change. Raises ValueError if the rate is not above
    0.
    """
    if not 0 < rate < inf:
        raise ValueError(
            f"the factor on the request rate must be a positive, finite number, not {rate}"
        )
    return [
        msgspec.structs.replace(request, arrival_s=request.arrival_s / rate) for request in requests
    ]


def mix_parts(parts: Sequence[MixPart]) -> list[TraceRequest]:
    """Return the requests of all parts in order of arrival.

    Parts share no blocks, even if their ids are equal. Raises ValueError if there are too many
    parts, or a rate is invalid.
    """
    if len(parts) > MOST_PARTS:
        raise ValueError(f"a mix may have at most {MOST_PARTS} parts, not {len(parts)}")
    merged: list[TraceRequest] = []
    for number, part in enumerate(parts):
        members = scale_rate(slice_span(part.requests, part.from_s, part.to_s), part.rate)
        merged += [_of_part(request, number, part) for request in members]
    return sorted(merged, key=lambda request: request.arrival_s)


def _of_part(request: TraceRequest, number: int, part: MixPart) -> TraceRequest:
    offset = number << TRACE_BITS
    return msgspec.structs.replace(
        request,
        blocks=tuple(block_id + offset for block_id in request.blocks),
        session=f"{number}/{request.session}" if request.session else "",
        slo=request.slo if part.slo is None else part.slo,
        tenant=request.tenant if part.tenant is None else part.tenant,
        priority=request.priority if part.priority is None else part.priority,
    )
