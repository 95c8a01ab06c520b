"""Computes which bytes to copy from one rank's KV blocks to those of another rank.

The result is a list of runs: byte ranges that are contiguous in the memory of both ranks. It
follows from the strides of both layouts, by arithmetic on numpy arrays. transfer_plan.py decides
which ranks, layers and tokens are copied.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvLayout, KvSteps

Offsets = NDArray[np.int64]

_MIN_JOINT_SHARE = 0.05
_MOST_CACHED_RUNS = 1024  # maximum runs of one cache entry, which then has at most 24 KiB


class ByteRuns(msgspec.Struct, frozen=True):
    """Byte ranges to copy from one rank's memory to another's, in order.

    src     offsets in bytes in the sending rank's memory
    dst     offsets in bytes in the receiving rank's memory
    length  lengths in bytes

    All three are int64 arrays of equal length.
    """

    src: Offsets
    dst: Offsets
    length: Offsets

    @property
    def count(self) -> int:
        return self.length.size

    @property
    def n_bytes(self) -> int:
        """Return the total number of bytes in all byte ranges to copy."""
        return self.length.item() if self.length.size == 1 else int(self.length.sum())

    def cut(self, first: int, count: int) -> ByteRuns:
        """Return `count` of these byte ranges from number `first` on, without copying the arrays.

        Raises IndexError if some of these ranges do not exist.
        """
        if first < 0 or count < 1 or first + count > self.length.size:
            raise IndexError(
                f"the byte ranges {first} to {first + count} do not exist; there are "
                f"{self.length.size}"
            )
        end = first + count
        if count == self.length.size:
            return self
        return ByteRuns(self.src[first:end], self.dst[first:end], self.length[first:end])


class RankPair(NamedTuple):
    """A sending (source) and a receiving (sink) rank that exchange bytes of a group of layers."""

    src_rank: int
    dst_rank: int


class PairShare(NamedTuple):
    """What one sending rank copies to one receiving rank in one group of layers.

    The layers and heads are those that both ranks hold, numbered as in the model.
    """

    pair: RankPair
    layers: range
    heads: range


class Segments(NamedTuple):
    """Ranges of tokens that are not interrupted by the end of a KV block at either engine.

    Blocks of the two engines may have different sizes, so a range can be shorter than a block. The
    attributes are arrays of equal length, with one element per range.

    src_block  number of the source's block
    src_token  position of the range's first token in that block
    dst_block  number of the sink's block
    dst_token  position of the range's first token in that block
    tokens     number of tokens in the range
    """

    src_block: Offsets
    src_token: Offsets
    dst_block: Offsets
    dst_token: Offsets
    tokens: Offsets


class SegmentPlace(NamedTuple):
    """Where a transfer's tokens lie, if a single block at each engine contains all of them.

    src_index  index of the block in the source's list of blocks
    dst_index  index of the block in the sink's list of blocks
    src_token  position of the first token in the source's block
    dst_token  position of the first token in the sink's block
    tokens     number of tokens
    """

    src_index: int
    dst_index: int
    src_token: int
    dst_token: int
    tokens: int

    @classmethod
    def of(cls, src: KvLayout, dst: KvLayout, covered: range) -> SegmentPlace | None:
        """Return where the tokens `covered` lie; None if an engine has them in several blocks.

        `src` and `dst` are the layouts of source and sink.
        """
        p, d = src.block_tokens, dst.block_tokens
        first, last = covered.start, covered.stop - 1
        if first // p != last // p or first // d != last // d:
            return None
        return cls(first // p, first // d, first % p, first % d, len(covered))

    def blocks(self, src_blocks: Offsets, dst_blocks: Offsets) -> tuple[int, int]:
        """Return the numbers of the two blocks that contain these tokens, as (source, sink).

        src_blocks  the source's blocks of the transfer, in order of their tokens
        dst_blocks  the sink's blocks of the transfer, in order of their tokens
        """
        return src_blocks.item(self.src_index), dst_blocks.item(self.dst_index)

    def segment(self, blocks: tuple[int, int]) -> Segments:
        """Return the place of these tokens as Segments with a single range.

        blocks  number of the source's block and number of the sink's block
        """
        numbers = (blocks[0], self.src_token, blocks[1], self.dst_token, self.tokens)
        return Segments(*(np.array([number], np.int64) for number in numbers))


def sorted_distinct(numbers: Offsets) -> Offsets:
    """Return the distinct numbers of an array in ascending order, faster than np.unique.

    Callers may hold a lock, so the time matters. The first call of np.unique also imports modules.
    """
    if numbers.size == 1:
        return numbers
    in_order = np.sort(numbers)
    return in_order[np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))]


def split_segments(
    src: KvLayout, dst: KvLayout, src_blocks: Offsets, dst_blocks: Offsets, covered: range
) -> Segments:
    """Split a request's tokens where a KV block ends at the source or at the sink.

    src, dst    layouts of source and sink
    src_blocks  the request's blocks at the source, in token order
    dst_blocks  the request's blocks at the sink, in token order
    covered     numbers of the tokens
    """
    place = SegmentPlace.of(src, dst, covered)
    if place is not None:
        return place.segment(place.blocks(src_blocks, dst_blocks))
    p, d = src.block_tokens, dst.block_tokens
    cuts = [
        np.arange(covered.start // size + 1, -(-covered.stop // size)) * size for size in {p, d}
    ]
    starts = sorted_distinct(np.concatenate([np.array([covered.start]), *cuts]))
    ends = np.append(starts[1:], covered.stop)
    return Segments(
        src_blocks[starts // p], starts % p, dst_blocks[starts // d], starts % d, ends - starts
    )


def max_runs(
    src: KvLayout, dst: KvLayout, share: PairShare, tokens: int, most_run_bytes: int
) -> int:
    """Return an upper limit of the number of byte ranges needed to copy some tokens.

    src, dst        layouts of source and sink
    share           the heads and layers that both ranks hold
    tokens          number of tokens, which lie within one block at both ends
    most_run_bytes  maximum length of one byte range
    """
    axes, n_bytes = _axes(src, dst, share, tokens)
    return prod(axis.size for axis in axes) * -(-n_bytes // most_run_bytes)


def build_runs(
    src: KvLayout, dst: KvLayout, segments: Segments, share: PairShare, most_run_bytes: int
) -> ByteRuns:
    """Return which bytes to copy from the source's to the sink's memory for some ranges of tokens.

    src, dst        layouts of source and sink
    segments        the ranges of tokens
    share           the heads and layers that both ranks hold
    most_run_bytes  maximum length of one byte range

    Adjacent byte ranges are joined. If blocks are the outermost dimension of neither layout, the
    blocks of a layer or head are neighbours. The byte ranges are then in the order of the sink's
    memory, so that more of them can be joined.
    """
    return _join_and_split(src, dst, _pieces(src, dst, segments, share), most_run_bytes)


def runs_between_blocks(
    src: KvLayout,
    dst: KvLayout,
    place: SegmentPlace,
    blocks: tuple[int, int],
    share: PairShare,
    most_run_bytes: int,
) -> ByteRuns:
    """Return which bytes to copy for tokens that lie within one block at both ends.

    blocks  numbers of the source's and of the sink's block

    The result equals that of build_runs(). It is faster, because the offsets within the blocks are
    cached.
    """
    cached = _runs_in_block(src, dst, share, place, most_run_bytes)
    if cached is None:
        return build_runs(src, dst, place.segment(blocks), share, most_run_bytes)
    runs, src_step, dst_step = cached
    return ByteRuns(runs.src + blocks[0] * src_step, runs.dst + blocks[1] * dst_step, runs.length)


# Apart from the numbers of the blocks, few small requests between two engines differ.
@lru_cache(64)
def _runs_in_block(
    src: KvLayout, dst: KvLayout, share: PairShare, place: SegmentPlace, most_run_bytes: int
) -> tuple[ByteRuns, int, int] | None:
    # Return the runs of a token range in block 0 of both ends, with the bytes from one block to
    # the next at the source and at the sink. None: there are too many runs to cache.
    if max_runs(src, dst, share, place.tokens, most_run_bytes) > _MOST_CACHED_RUNS:
        return None
    runs = build_runs(src, dst, place.segment((0, 0)), share, most_run_bytes)
    runs.length.flags.writeable = False  # all plans share these arrays
    src_steps, dst_steps = _steps(src, share.pair.src_rank), _steps(dst, share.pair.dst_rank)
    return runs, src_steps.block, dst_steps.block


def _join_and_split(
    src: KvLayout, dst: KvLayout, pieces: ByteRuns, most_run_bytes: int
) -> ByteRuns:
    if not (src.order.is_block_outermost or dst.order.is_block_outermost):
        sorting = np.argsort(pieces.dst, kind="stable")
        pieces = ByteRuns(pieces.src[sorting], pieces.dst[sorting], pieces.length[sorting])
    return _split_long(_join(pieces), most_run_bytes)


def _pieces(src: KvLayout, dst: KvLayout, segments: Segments, share: PairShare) -> ByteRuns:
    # Return the pieces of all segments; segments of equal length have the same inner structure.
    if segments.tokens.size == 1:
        return _equal_pieces(src, dst, segments, share, int(segments.tokens[0]))
    columns, segment_numbers = [], []
    for length in sorted_distinct(segments.tokens):
        (indices,) = np.nonzero(segments.tokens == length)
        equal = Segments(*(column[indices] for column in segments))
        pieces = _equal_pieces(src, dst, equal, share, int(length))
        columns.append(pieces)
        segment_numbers.append(np.repeat(indices, pieces.count // indices.size))
    if len(columns) == 1:
        return columns[0]
    sorting = np.argsort(np.concatenate(segment_numbers), kind="stable")
    return ByteRuns(
        np.concatenate([pieces.src for pieces in columns])[sorting],
        np.concatenate([pieces.dst for pieces in columns])[sorting],
        np.concatenate([pieces.length for pieces in columns])[sorting],
    )


def _equal_pieces(
    src: KvLayout, dst: KvLayout, segments: Segments, share: PairShare, tokens: int
) -> ByteRuns:
    # Return the pieces of segments that all have `tokens` tokens.
    (src_pieces, dst_pieces), n_bytes = _lattice(src, dst, share, tokens)
    src_at = _origin(src, share.pair.src_rank, share, segments.src_block, segments.src_token)
    dst_at = _origin(dst, share.pair.dst_rank, share, segments.dst_block, segments.dst_token)
    from_offsets = (src_at[:, None] + src_pieces).ravel()
    to_offsets = (dst_at[:, None] + dst_pieces).ravel()
    return ByteRuns(from_offsets, to_offsets, np.full(from_offsets.size, n_bytes))


class _Axis(NamedTuple):
    size: int
    src_step: int
    dst_step: int


# Every transfer between two engines has the same few shares and segment lengths.
@lru_cache(256)
def _axes(
    src: KvLayout, dst: KvLayout, share: PairShare, tokens: int
) -> tuple[tuple[_Axis, ...], int]:
    # Return the axes along which a segment is divided into pieces, and the bytes of one piece.
    #
    # A piece starts as one row and absorbs every axis along which both sides are contiguous.
    from_steps, to_steps = _steps(src, share.pair.src_rank), _steps(dst, share.pair.dst_rank)
    sizes = (len(share.layers), src.parts, len(share.heads), tokens)
    axes = [
        _Axis(size, getattr(from_steps, name), getattr(to_steps, name))
        for name, size in zip(("layer", "part", "head", "token"), sizes, strict=True)
        if size > 1
    ]
    n_bytes = src.row_bytes
    while (
        joined := next((axis for axis in axes if axis.src_step == axis.dst_step == n_bytes), None)
    ) is not None:
        n_bytes *= joined.size
        axes.remove(joined)
    return tuple(axes), n_bytes


def _lattice(
    src: KvLayout, dst: KvLayout, share: PairShare, tokens: int
) -> tuple[tuple[Offsets, Offsets], int]:
    axes, n_bytes = _axes(src, dst, share, tokens)
    src_at = dst_at = np.zeros(1, np.int64)
    for axis in axes:
        steps_of_axis = np.arange(axis.size)
        src_at = (src_at[:, None] + steps_of_axis * axis.src_step).ravel()
        dst_at = (dst_at[:, None] + steps_of_axis * axis.dst_step).ravel()
    return (src_at, dst_at), n_bytes


def _steps(layout: KvLayout, rank: int) -> KvSteps:
    return layout.steps(rank // layout.tp)


def _origin(
    layout: KvLayout, rank: int, share: PairShare, blocks: Offsets, tokens: Offsets
) -> Offsets:
    # Return the byte offset in the rank's memory of each token's KV, at the share's first layer and
    # head.
    #
    # A token is given by its block and its position in that block.
    inside, block_step, token_step = _first_row(layout, rank, share)
    return blocks * block_step + tokens * token_step + inside


@lru_cache(256)
def _first_row(layout: KvLayout, rank: int, share: PairShare) -> tuple[int, int, int]:
    # Return the bytes from a token's place to its KV at the share's first layer and head, and the
    # strides of blocks and tokens.
    stage, tp_rank = divmod(rank, layout.tp)
    steps = layout.steps(stage)
    inside = (share.layers.start - layout.layers_of(stage).start) * steps.layer
    inside += (share.heads.start - layout.heads_of(tp_rank).start) * steps.head
    return inside, steps.block, steps.token


def _join(runs: ByteRuns) -> ByteRuns:
    # Return the byte ranges (runs), with neighbours joined that are contiguous on both sides.
    #
    # If only a few would join, the runs stay unchanged: runs of equal length are copied faster.
    if runs.count == 1:
        return runs
    ends = (runs.src[1:] != runs.src[:-1] + runs.length[:-1]) | (
        runs.dst[1:] != runs.dst[:-1] + runs.length[:-1]
    )
    joints = ends.size - int(np.count_nonzero(ends))
    if joints <= ends.size * _MIN_JOINT_SHARE:
        return runs
    firsts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(ends) + 1])
    return ByteRuns(runs.src[firsts], runs.dst[firsts], np.add.reduceat(runs.length, firsts))


def _split_long(runs: ByteRuns, most: int) -> ByteRuns:
    if runs.length.max() <= most:
        return runs
    pieces = -(-runs.length // most)
    run_numbers = np.repeat(np.arange(runs.length.size), pieces)
    offset = (np.arange(run_numbers.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return ByteRuns(
        runs.src[run_numbers] + offset,
        runs.dst[run_numbers] + offset,
        np.minimum(runs.length[run_numbers] - offset, most),
    )
