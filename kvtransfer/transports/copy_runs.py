"""Copies many byte ranges within one machine's memory, with few interpreter steps for each.

shm.py decides which memory is copied, and when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns, Offsets
from kvtransfer.layout.memory_regions import Region

_LARGE = 16 << 10  # size from which a copy takes longer than an interpreter step
# Copies below this size keep the interpreter lock: they end before another thread could use it.
_SHORT = 256 << 10
_AT_ONCE = 256 << 10  # bytes gathered and scattered together, while still in the cache
_MANY = 65
_FINE = 2 << 10
_LEAST_CELL = 8

Bytes = NDArray[np.uint8]


def are_within(region: Region, offsets: Offsets, lengths: Offsets) -> bool:
    """Return whether all byte ranges have a positive length and lie within the memory region."""
    if len(lengths) == 1:
        offset, length = offsets.item(), lengths.item()
        return offset >= 0 and length > 0 and offset + length <= region.bytes.size
    if not len(lengths) or np.minimum.reduce(offsets) < 0 or np.minimum.reduce(lengths) < 1:
        return False
    return bool(np.maximum.reduce(offsets + lengths) <= region.bytes.size)


def split_by_bytes(runs: ByteRuns, step_bytes: int) -> Iterator[ByteRuns]:
    """Yield the byte ranges in order, in parts of about `step_bytes` bytes each."""
    ends = runs.length.cumsum()
    first, count = 0, len(ends)
    while first < count:
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, begin + step_bytes, "right")))
        yield runs if last - first == count else runs.cut(first, last - first)
        first = last


def copy_runs(source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: ByteRuns) -> None:
    """Copy every byte range from `source` to `sink`.

    The caller must have checked with `are_within` that all ranges lie within both memories.
    """
    length = runs.length.item(0)
    if length < _LARGE and runs.count > 2 and _is_regular(source, sink, runs, length):
        _copy_regular(source, sink, runs, length)
        return
    # numpy's copy takes more steps but releases the interpreter lock, which pays off for long runs.
    short = int(np.maximum.reduce(runs.length)) <= _SHORT
    into: Any = sink.data if short else sink
    out_of: Any = source.data if short else source
    for src, dst, size in zip(
        runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True
    ):
        into[dst : dst + size] = out_of[src : src + size]


def _is_regular(
    source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: ByteRuns, length: int
) -> bool:
    if source.size % length or sink.size % length or np.logical_or.reduce(runs.length != length):
        return False
    return not (np.logical_or.reduce(runs.src % length) or np.logical_or.reduce(runs.dst % length))


def _copy_regular(
    source: NDArray[np.uint8], sink: NDArray[np.uint8], runs: ByteRuns, length: int
) -> None:
    cell = np.dtype((np.void, length))
    rows, into = source.view(cell), sink.view(cell)
    src, dst = runs.src // length, runs.dst // length
    step = max(1, _AT_ONCE // length)
    for first in range(0, len(src), step):
        into[dst[first : first + step]] = rows[src[first : first + step]]


def is_fine_grained(runs: ByteRuns, n_bytes: int) -> bool:
    """Return whether byte ranges are so many and short that copying them together first is faster.

    `n_bytes` is the sum of their lengths.
    """
    return runs.count >= _MANY and n_bytes < runs.count * _FINE


def gather(
    source: Bytes,
    offsets: Offsets,
    lengths: Offsets,
    into: Bytes,
    on_part: Callable[[Bytes], object],
) -> None:
    """Copy byte ranges of `source` one after another to `into`, which has their total size.

    `on_part` is called with each part right after it was copied.
    """
    for cells, rows, begin, end in _in_cells(source, offsets, lengths):
        part = into[begin:end]
        if cells is None:
            _gather_runs(rows, offsets, lengths, part)
        else:
            # mode="clip" avoids another copy in numpy; the caller has checked the bounds.
            np.take(rows, cells, out=part.view(rows.dtype), mode="clip")
        on_part(part)


def scatter(source: Bytes, sink: Bytes, offsets: Offsets, lengths: Offsets) -> None:
    for cells, rows, begin, end in _in_cells(sink, offsets, lengths):
        if cells is None:
            _scatter_runs(source[begin:end], rows, offsets, lengths)
        else:
            rows[cells] = source[begin:end].view(rows.dtype)


def _in_cells(
    memory: Bytes, offsets: Offsets, lengths: Offsets
) -> Iterator[tuple[Offsets | None, Any, int, int]]:
    # Yield (cell indices, memory as cells, first byte, end byte), some cells at a time.
    #
    # Cells are the largest units to which all runs are aligned. Indices of None mean that the cells
    # are too small to save time; the part then covers all runs.
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
        part = cells[first : first + step]
        yield part, rows, first * cell, (first + part.size) * cell


def _gather_runs(source: Bytes, offsets: Offsets, lengths: Offsets, into: Bytes) -> None:
    offset, memory, target = 0, source.data, into.data
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        target[offset : offset + length] = memory[start : start + length]
        offset += length


def _scatter_runs(source: Bytes, sink: Bytes, offsets: Offsets, lengths: Offsets) -> None:
    offset, memory, target = 0, source.data, sink.data
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        target[start : start + length] = memory[offset : offset + length]
        offset += length
