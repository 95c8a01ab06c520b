"""Converts recorded requests to shapes: turn of the session, and new share of the prompt.
No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from planner.traces import TraceRequest
from policies.sizing.drift import DriftWatch, DriftWindow, RequestShape, ShapeCounts

MAX_BLOCKS, MAX_SESSIONS = 1 << 20, 1 << 17


class ShapeReader:
    """Converts requests to shapes, with a bounded memory of prompt blocks and sessions."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._turns: OrderedDict[str, int] = OrderedDict()

    def read(self, request: TraceRequest) -> RequestShape:
        """Return the shape of the next request, in order of arrival."""
        new = sum(block not in self._blocks for block in request.blocks)
        for block in request.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        share = new / len(request.blocks) if request.blocks else 1.0
        return RequestShape(
            request.input_tokens, request.output_tokens, share, self._turn(request.session)
        )

    def _turn(self, session: str) -> int:
        if not session:
            return 1
        turn = self._turns.pop(session, 0) + 1
        self._turns[session] = turn
        if len(self._turns) > MAX_SESSIONS:
            self._turns.popitem(last=False)
        return turn


def count_shapes(requests: Iterable[TraceRequest]) -> ShapeCounts:
    reader, counts = ShapeReader(), ShapeCounts()
    for request in requests:
        counts.add(reader.read(request))
    return counts


def windows_of(requests: Iterable[TraceRequest], watch: DriftWatch) -> Iterator[DriftWindow]:
    """Yield the windows of requests in order of arrival. The last, incomplete one is left out."""
    reader = ShapeReader()
    for request in requests:
        yield from watch.add(request.arrival_s, reader.read(request))
