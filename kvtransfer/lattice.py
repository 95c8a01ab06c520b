"""Lattice: which bytes on the one side are which on the other, for some heads of some layers of a stretch of tokens.
Two layouts' ways to step through a block, and the runs in which both go on without a gap. Arithmetic on numpy arrays.

Not here: which ranks, layers and tokens go together (reshard.py).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import KvLayout, KvOrder

Offsets = NDArray[np.int64]

_FEW_JOINTS = 0.05


class Runs(msgspec.Struct, frozen=True):
    """Pieces of memory to copy, in order: int64 arrays of one length. Offsets are into the ranks' regions, in bytes."""

    src: Offsets
    dst: Offsets
    length: Offsets

    @property
    def count(self) -> int:
        return self.length.size

    @property
    def n_bytes(self) -> int:
        return int(self.length.sum())

    def cut(self, first: int, count: int) -> Runs:
        """Runs [first, first + count), sharing memory. Raises IndexError where there are not so many."""
        if first < 0 or count < 1 or first + count > self.length.size:
            raise IndexError(f"runs {first} to {first + count} of {self.length.size}")
        end = first + count
        return Runs(self.src[first:end], self.dst[first:end], self.length[first:end])


class Pair(NamedTuple):
    """Two ranks between which bytes of a layer group move."""

    src_rank: int
    dst_rank: int


class Share(NamedTuple):
    """What one pair moves in one group: layers and heads, by their number in the model."""

    pair: Pair
    layers: range
    heads: range


class Segments(NamedTuple):
    """Stretches of tokens that lie in one block on either side: where they begin, and how long each is, in tokens."""

    src_block: Offsets
    src_token: Offsets
    dst_block: Offsets
    dst_token: Offsets
    tokens: Offsets


def distinct(numbers: Offsets) -> Offsets:
    """Each of these numbers once, in order. For 100,000 of them twenty times as fast as np.unique: it is done while
    others wait."""
    in_order = np.sort(numbers)
    return in_order[np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))]


def segments_of(
    src: KvLayout, dst: KvLayout, src_blocks: Offsets, dst_blocks: Offsets, covered: range
) -> Segments:
    """The covered tokens, cut wherever a block ends on either side."""
    p, d = src.block_tokens, dst.block_tokens
    cuts = [
        np.arange(covered.start // size + 1, -(-covered.stop // size)) * size for size in {p, d}
    ]
    starts = distinct(np.concatenate([np.array([covered.start]), *cuts]))
    ends = np.append(starts[1:], covered.stop)
    return Segments(
        src_blocks[starts // p], starts % p, dst_blocks[starts // d], starts % d, ends - starts
    )


def most_runs(src: KvLayout, dst: KvLayout, share: Share, tokens: int, most_run_bytes: int) -> int:
    """How many runs a segment of so many tokens is at most."""
    axes, n_bytes = _axes(src, dst, share, tokens)
    return prod(axis.size for axis in axes) * -(-n_bytes // most_run_bytes)


def runs_of(
    src: KvLayout, dst: KvLayout, segments: Segments, share: Share, most_run_bytes: int
) -> Runs:
    """What a share of these segments copies, neighbours joined, none longer than `most_run_bytes`."""
    return _limited(_joined(_pieces(src, dst, segments, share)), most_run_bytes)


def _pieces(src: KvLayout, dst: KvLayout, segments: Segments, share: Share) -> Runs:
    """Every segment's pieces. Segments of one length are alike inside, so each length is one lattice of pieces."""
    made, order = [], []
    for length in np.unique(segments.tokens):
        (chosen,) = np.nonzero(segments.tokens == length)
        pieces, n_bytes = _lattice(src, dst, share, int(length))
        src_at = _origin(
            src, share.pair.src_rank, share, segments.src_block[chosen], segments.src_token[chosen]
        )
        dst_at = _origin(
            dst, share.pair.dst_rank, share, segments.dst_block[chosen], segments.dst_token[chosen]
        )
        made.append(
            [
                (at[:, None] + piece).ravel()
                for at, piece in zip((src_at, dst_at), pieces, strict=True)
            ]
        )
        made[-1].append(np.full(made[-1][0].size, n_bytes))
        order.append(np.repeat(chosen, pieces[0].size))
    if len(made) == 1:
        return Runs(*made[0])
    sorting = np.argsort(np.concatenate(order), kind="stable")
    return Runs(*(np.concatenate(columns)[sorting] for columns in zip(*made, strict=True)))


class _Axis(NamedTuple):
    """One way to step through a segment: how often, and how far one step goes on either side, in bytes."""

    size: int
    src_step: int
    dst_step: int


def _axes(src: KvLayout, dst: KvLayout, share: Share, tokens: int) -> tuple[list[_Axis], int]:
    """The axes along which a segment is in pieces, and the bytes of one piece.

    A piece starts as one row and takes in every axis along which both sides go on without a gap.
    """
    steps = zip(_steps(src), _steps(dst), strict=True)
    sizes = (len(share.layers), src.parts, len(share.heads), tokens)
    axes = [_Axis(size, *both) for size, both in zip(sizes, steps, strict=True) if size > 1]
    n_bytes = src.row_bytes
    while (
        joined := next((axis for axis in axes if axis.src_step == axis.dst_step == n_bytes), None)
    ) is not None:
        n_bytes *= joined.size
        axes.remove(joined)
    return axes, n_bytes


def _lattice(
    src: KvLayout, dst: KvLayout, share: Share, tokens: int
) -> tuple[tuple[Offsets, Offsets], int]:
    """Offsets of a segment's pieces from its origin, on either side, and the bytes of one piece."""
    axes, n_bytes = _axes(src, dst, share, tokens)
    src_at = dst_at = np.zeros(1, np.int64)
    for axis in axes:
        steps_of_axis = np.arange(axis.size)
        src_at = (src_at[:, None] + steps_of_axis * axis.src_step).ravel()
        dst_at = (dst_at[:, None] + steps_of_axis * axis.dst_step).ravel()
    return (src_at, dst_at), n_bytes


def _steps(layout: KvLayout) -> tuple[int, int, int, int]:
    """Bytes from one layer, part, head and token of a block to the next."""
    row, heads, tokens = layout.row_bytes, layout.rank_heads, layout.block_tokens
    part = row * heads * tokens
    head, token = (row * tokens, row) if layout.order is KvOrder.HND else (row, row * heads)
    return part * layout.parts, part, head, token


def _origin(layout: KvLayout, rank: int, share: Share, blocks: Offsets, tokens: Offsets) -> Offsets:
    """Where the share's first layer and head of these tokens lie in the region of `rank`."""
    stage, tp_rank = divmod(rank, layout.tp)
    layer, _, head, token = _steps(layout)
    inside = (share.layers.start - layout.layers_of(stage).start) * layer
    inside += (share.heads.start - layout.heads_of(tp_rank).start) * head
    return blocks * layout.rank_block_bytes(rank) + tokens * token + inside


def _joined(runs: Runs) -> Runs:
    """Neighbours that go on without a gap on both sides become one.

    Unless hardly any do: runs of one length are copied faster, so a few joints are not worth losing that.
    """
    ends = (runs.src[1:] != runs.src[:-1] + runs.length[:-1]) | (
        runs.dst[1:] != runs.dst[:-1] + runs.length[:-1]
    )
    joints = ends.size - int(np.count_nonzero(ends))
    if joints <= ends.size * _FEW_JOINTS:
        return runs
    firsts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(ends) + 1])
    return Runs(runs.src[firsts], runs.dst[firsts], np.add.reduceat(runs.length, firsts))


def _limited(runs: Runs, most: int) -> Runs:
    """Runs longer than `most` bytes are cut into pieces of `most` and a rest."""
    if runs.length.max() <= most:
        return runs
    pieces = -(-runs.length // most)
    of = np.repeat(np.arange(runs.length.size), pieces)
    at = (np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return Runs(runs.src[of] + at, runs.dst[of] + at, np.minimum(runs.length[of] - at, most))
