"""Converts recorded requests to shapes, such as the turn of the session and the prompt's new share.

No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from planner.traces import TraceRequest
from policies.sizing.drift import DriftWatch, DriftWindow, RequestShape, ShapeCounts

MAX_BLOCKS, MAX_SESSIONS = 1 << 20, 1 << 17


class ShapeReader:
    """Converts recorded requests to shapes, with a bounded memory of prompt blocks and sessions."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._turns: OrderedDict[str, int] = OrderedDict()

    def read(self, request: TraceRequest) -> RequestShape:
        """Return the shape of the next recorded request.

        Requests must be passed in order of arrival.
        """
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
    """Group requests into consecutive windows of time, and yield these in order.

    The last, incomplete one is left out.
    """
    reader = ShapeReader()
    for request in requests:
        yield from watch.add(request.arrival_s, reader.read(request))
