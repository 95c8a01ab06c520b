"""Copying runs within one machine's memory, as few interpreter steps per run as their size allows.

Not here: whose memory it is, or when (shm.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.lattice import Offsets, Runs
from kvtransfer.regions import Region

_LARGE = 16 << 10  # from here on a copy costs more than the step that asks for it
_SHORT = (
    256 << 10
)  # up to here a copy is over before another thread could use the interpreter in the meantime
_AT_ONCE = 256 << 10  # gathered and scattered again while it is still in the cache
_MANY = 65
_FINE = 2 << 10
_LEAST_CELL = 8

Bytes = NDArray[np.uint8]


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
    for src, dst, size in zip(
        runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True
    ):
        into[dst : dst + size] = out_of[src : src + size]


def _regular(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: Runs, length: int) -> bool:
    """All of one length, and at multiples of it: cells of a grid."""
    if source.size % length or sink.size % length or np.logical_or.reduce(runs.length != length):
        return False
    return not (np.logical_or.reduce(runs.src % length) or np.logical_or.reduce(runs.dst % length))


def _copy_regular(
    source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: Runs, length: int
) -> None:
    cell = np.dtype((np.void, length))
    rows, into = source.view(cell), sink.view(cell)
    src, dst = runs.src // length, runs.dst // length
    step = max(1, _AT_ONCE // length)
    for first in range(0, len(src), step):
        into[dst[first : first + step]] = rows[src[first : first + step]]


def fine(runs: Runs, n_bytes: int) -> bool:
    """Whether they are so many and so short that a copy of them all costs less than to name each to the kernel and to a
    digest."""
    return runs.count >= _MANY and n_bytes < runs.count * _FINE


def gather(
    source: Bytes, offsets: Offsets, lengths: Offsets, into: Bytes, fed: Callable[[Bytes], object]
) -> None:
    """Copy these runs of `source` behind each other into `into`, which has just room for them. `fed` hears of every
    stretch while it is in the cache."""
    for cells, rows, at, end in _in_cells(source, offsets, lengths):
        part = into[at:end]
        if cells is None:
            _gather_each(rows, offsets, lengths, part)
        else:
            # Clipped, as that is what numpy does without another copy; who calls has looked at the bounds.
            np.take(rows, cells, out=part.view(rows.dtype), mode="clip")
        fed(part)


def scatter(source: Bytes, sink: Bytes, offsets: Offsets, lengths: Offsets) -> None:
    """The other way: what lies behind each other in `source` goes to these runs of `sink`."""
    for cells, rows, at, end in _in_cells(sink, offsets, lengths):
        if cells is None:
            _scatter_each(source[at:end], rows, offsets, lengths)
        else:
            rows[cells] = source[at:end].view(rows.dtype)


def _in_cells(
    memory: Bytes, offsets: Offsets, lengths: Offsets
) -> Iterator[tuple[Offsets | None, Any, int, int]]:
    """(cells, memory in such cells, bytes before them, and with them), some at a time: cells are what all runs are made
    of and aligned to. None: that is too little to be worth it, and all runs are meant."""
    cell = math.gcd(int(np.gcd.reduce(offsets)), int(np.gcd.reduce(lengths)))
    if cell < _LEAST_CELL:
        yield None, memory, 0, int(np.add.reduce(lengths))
        return
    rows = memory[: memory.size // cell * cell].view(np.dtype((np.void, cell)))
    counts, firsts = lengths // cell, offsets // cell
    begins = np.cumsum(counts) - counts
    cells = np.repeat(firsts - begins, counts) + np.arange(int(counts.sum()))
    step = max(1, _AT_ONCE // cell)
    for first in range(0, cells.size, step):
        some = cells[first : first + step]
        yield some, rows, first * cell, (first + some.size) * cell


def _gather_each(source: Bytes, offsets: Offsets, lengths: Offsets, into: Bytes) -> None:
    at, memory, room = 0, source.data, into.data
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        room[at : at + length] = memory[start : start + length]
        at += length


def _scatter_each(source: Bytes, sink: Bytes, offsets: Offsets, lengths: Offsets) -> None:
    at, memory, room = 0, source.data, sink.data
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        room[start : start + length] = memory[at : at + length]
        at += length
