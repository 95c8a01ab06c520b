"""Converts recorded requests to the measures of drift, such as prompt length and turn of the
session.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.traces import TraceRequest
from policies.sizing.workload_drift import (
    DriftWatch,
    DriftWindow,
    RequestShape,
    ShapeCounts,
    ShapeMemory,
)


def shape_of(memory: ShapeMemory, request: TraceRequest) -> RequestShape:
    """Return a request's lengths, the new share of its prompt, and its turn in its session.

    Drift is detected by these measures.

    memory   what is remembered of earlier requests, to recognise known prompts and sessions
    request  the request. Call this in order of arrival
    """
    return memory.shape(
        request.input_tokens, request.output_tokens, request.blocks, request.session
    )


def count_shapes(requests: Iterable[TraceRequest]) -> ShapeCounts:
    memory, counts = ShapeMemory(), ShapeCounts()
    for request in requests:
        counts.add(shape_of(memory, request))
    return counts


def windows_of(
    requests: Iterable[TraceRequest], watch: DriftWatch, begin_s: float = 0.0
) -> Iterator[DriftWindow]:
    """Yield consecutive windows (usually ten minutes) of requests, in order.

    requests  the recorded requests in order of arrival
    watch     compares each window with what the fleet was sized for
    begin_s   time of the first request, in Unix seconds if known

    The last, incomplete window is left out.
    """
    memory = ShapeMemory()
    for request in requests:
        yield from watch.add(begin_s + request.arrival_s, shape_of(memory, request))
