"""Copying runs within one machine's memory, as few interpreter steps per run as their size allows.

Not here: whose memory it is, or when (shm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.regions import Region
from kvtransfer.reshard import Offsets, Runs

_LARGE = 16 << 10  # from here on a copy costs more than the step that asks for it
_SHORT = 256 << 10  # up to here a copy is over before another thread could use the interpreter in the meantime
_AT_ONCE = 256 << 10  # gathered and scattered again while it is still in the cache


def within(region: Region, offsets: Offsets, lengths: Offsets) -> bool:
    """Whether all of these runs lie in the region, and are runs."""
    if len(lengths) == 1:
        at, length = offsets.item(), lengths.item()
        return at >= 0 and length > 0 and at + length <= region.bytes.size
    if not len(lengths) or np.minimum.reduce(offsets) < 0 or np.minimum.reduce(lengths) < 1:
        return False
    return bool(np.maximum.reduce(offsets + lengths) <= region.bytes.size)


def in_steps(runs: Runs, step_bytes: int) -> Iterator[Runs]:
    """The runs in order, about `step_bytes` at a time."""
    ends = runs.length.cumsum()
    first, count = 0, len(ends)
    while first < count:
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, begin + step_bytes, "right")))
        yield runs if last - first == count else runs.cut(first, last - first)
        first = last


def copy_runs(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: Runs) -> None:
    """Copy every run. Both must hold all of them (`within`)."""
    length = runs.length.item(0)
    if length < _LARGE and runs.count > 2 and _regular(source, sink, runs, length):
        _copy_regular(source, sink, runs, length)
        return
    # Of two ways that copy alike, numpy's takes twice the steps and lets other threads run.
    short = int(np.maximum.reduce(runs.length)) <= _SHORT
    into: Any = sink.data if short else sink
    out_of: Any = source.data if short else source
    for src, dst, size in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        into[dst : dst + size] = out_of[src : src + size]


def _regular(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: Runs, length: int) -> bool:
    """All of one length, and at multiples of it: cells of a grid."""
    if source.size % length or sink.size % length or np.logical_or.reduce(runs.length != length):
        return False
    return not (np.logical_or.reduce(runs.src % length) or np.logical_or.reduce(runs.dst % length))


def _copy_regular(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: Runs, length: int) -> None:
    cell = np.dtype((np.void, length))
    rows, into = source.view(cell), sink.view(cell)
    src, dst = runs.src // length, runs.dst // length
    step = max(1, _AT_ONCE // length)
    for first in range(0, len(src), step):
        into[dst[first : first + step]] = rows[src[first : first + step]]
