"""Plans which bytes of KV to copy between two engines whose caches have different layouts.

A plan lists byte ranges by group of layers and by pair of ranks (GPUs). They are sent in windows, a
window being some byte ranges of one pair. The sending and the receiving agent compute the same plan
from the same numbers. So no memory addresses are sent: a window names its byte ranges by their
numbers in the plan.

If the byte ranges of a plan or their order change, agent_messages.VERSION must be raised. A test
compares today's plans. This module does not copy bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvtransfer.layout.byte_ranges import (
    ByteRuns,
    Offsets,
    PairShare,
    RankPair,
    SegmentPlace,
    Segments,
    build_runs,
    max_runs,
    runs_between_blocks,
    sorted_distinct,
    split_segments,
)
from kvtransfer.layout.kv_layout import KvContent, KvLayout

Blocks = Sequence[int] | Offsets

MAX_RUN_BYTES = 1 << 20
MAX_RUNS = 1 << 16
GROUP_BYTES = 6 << 20
_MOST_BLOCK = 1 << 31
_INT64 = np.dtype(np.int64)


class LayoutMismatch(Exception):
    """Raised if a KV cache of one layout cannot be converted to another one.

    The message names the field that differs.
    """


class PlannedWindow(NamedTuple):
    """A window: some byte ranges of a transfer plan that are sent, received and verified as a unit.

    All of them are between the same two ranks, in one group of layers.

    pair     number of the pair of ranks
    first    number of the first byte range in the plan
    n_runs   number of byte ranges
    n_bytes  sum of their lengths
    """

    pair: int
    first: int
    n_runs: int
    n_bytes: int


class Ranks(NamedTuple):
    """The ranks between which a plan copies KV.

    src  rank of the source; None: all ranks
    dst  rank of the sink; None: all ranks
    """

    src: int | None = None
    dst: int | None = None


ALL_RANKS = Ranks()


class _Limits(NamedTuple):
    # Limits of a transfer plan: bytes of the longest run, and runs per rank pair in a layer group.

    run_bytes: int
    runs: int


class _Request(NamedTuple):
    # The properties of a request on which its plan depends, apart from its blocks.
    #
    # ranks  the ranks whose KV is moved

    src: KvLayout
    dst: KvLayout
    skip_tokens: int
    tokens: int
    group_layers: int | None
    limits: _Limits
    ranks: Ranks


class _Division(NamedTuple):
    # The division of a transfer between two layouts, which does not depend on its blocks.
    #
    # bands        layers of each band, which are sent together
    # shares       what each rank pair moves in each band
    # pairs        the rank pairs of each band
    # token_bytes  bytes of one token in each band, over all pairs
    # most_pairs   largest number of pairs of a band

    bands: tuple[range, ...]
    shares: tuple[tuple[PairShare, ...], ...]
    pairs: tuple[tuple[RankPair, ...], ...]
    token_bytes: tuple[int, ...]
    most_pairs: int


class _Outline(NamedTuple):
    # The part of a transfer plan that does not depend on the numbers of its blocks.
    #
    # place  where the tokens lie if one block at either end has them all; otherwise None

    src: KvLayout
    dst: KvLayout
    tokens: range
    group_layers: int
    limits: _Limits
    division: _Division
    place: SegmentPlace | None


class TransferPlan:
    """Which bytes one KV transfer copies, by group of layers and pair of ranks.

    plan_transfer() creates a plan. Several threads may use it. Byte ranges are computed when they
    are first needed.

    groups  number of layer groups, which are sent one after the other. A group is some consecutive
            layers of all tokens. If this would need too many byte ranges, the tokens are divided
            into chunks; each chunk then has its own groups
    tokens  number of tokens to copy, including unused places at the end of the last block
    """

    def __init__(self, outline: _Outline, tokens_at: Segments | tuple[int, int]) -> None:
        # tokens_at  the token ranges; if the outline has a place, the two blocks at that place
        self.src, self.dst, self.tokens = outline.src, outline.dst, outline.tokens
        self.group_layers = outline.group_layers
        self._outline, self._division = outline, outline.division
        if isinstance(tokens_at, Segments):
            self._chunks = _chunks(outline, tokens_at)
            self._chunk_tokens = tuple(int(np.add.reduce(chunk.tokens)) for chunk in self._chunks)
        else:
            assert outline.place is not None
            self._blocks, self._chunk_tokens = tokens_at, (outline.place.tokens,)
        self.groups = len(self._division.bands) * len(self._chunk_tokens)
        self._cached_runs: dict[tuple[int, int], ByteRuns] = {}

    def layers(self, group: int) -> range:
        """Return which layers of the model are sent together as this group.

        Raises IndexError if there is no such group.
        """
        return self._division.bands[self._band(group)]

    def ready_groups(self, layers: int) -> int:
        """Return the number of groups of layers that may be sent once `layers` layers are computed.

        KV is sent by groups of layers. A group may be sent when all of its layers are computed.
        """
        if layers >= self.src.layers:
            return self.groups
        return max(layers, 0) // self.group_layers * len(self._chunk_tokens)

    def complete_layers(self, groups: int) -> int:
        """Return how many layers are complete when `groups` groups of layers have arrived."""
        return min(groups // len(self._chunk_tokens) * self.group_layers, self.src.layers)

    def pairs(self, group: int) -> tuple[RankPair, ...]:
        """Return the sorted pairs (sending rank, receiving rank) that exchange a group of layers.

        The header of a window has a pair number, which is an index into this list.
        """
        return self._division.pairs[self._band(group)]

    def runs(self, group: int, pair: int) -> ByteRuns:
        """Return which bytes a pair of ranks copies in a group of layers.

        pair  index of the pair in the list that pairs() returns

        Raises IndexError for a pair that does not exist.
        """
        runs = self._cached_runs.get((group, pair))
        if runs is not None:
            return runs
        shares = self._division.shares[self._band(group)]
        if not 0 <= pair < len(shares):
            raise IndexError(f"there is no rank pair {pair}; the layer group has {len(shares)}")
        runs = self._build_runs(group, shares[pair])
        # Windows come group by group, so the runs of two groups are enough to cache.
        if len(self._cached_runs) >= max(2, 2 * self._division.most_pairs):
            self._cached_runs.pop(next(iter(self._cached_runs)), None)
        self._cached_runs[group, pair] = runs
        return runs

    def _build_runs(self, group: int, share: PairShare) -> ByteRuns:
        place, run_bytes = self._outline.place, self._outline.limits.run_bytes
        if place is not None:
            return runs_between_blocks(self.src, self.dst, place, self._blocks, share, run_bytes)
        chunk = self._chunks[group % len(self._chunks)]
        return build_runs(self.src, self.dst, chunk, share, run_bytes)

    def group_bytes(self, group: int) -> int:
        """Return how many bytes are copied for one group of layers, by all ranks together."""
        tokens = self._chunk_tokens[group % len(self._chunk_tokens)]
        return self._division.token_bytes[self._band(group)] * tokens

    def bytes_by_group(self) -> list[int]:
        """Return how many bytes each group of layers has, in order.

        There can be tens of thousands of groups.
        """
        if self.groups == 1:
            return [self.n_bytes]
        per_token = self._division.token_bytes
        return np.multiply.outer(per_token, self._chunk_tokens).ravel().tolist()

    @property
    def n_bytes(self) -> int:
        """Return the total number of KV bytes that the transfer moves."""
        return sum(self._division.token_bytes) * sum(self._chunk_tokens)

    def windows(self, group: int, window_bytes: int) -> Iterator[PlannedWindow]:
        """Yield the windows in which the KV of a group of layers is sent.

        A window is some byte ranges that are sent as a unit, of at most `window_bytes` bytes. A
        longer byte range is a window by itself. Source and sink compute the same windows.
        """
        for pair in range(len(self._division.shares[self._band(group)])):
            runs = self.runs(group, pair)
            if runs.count == 1:
                yield PlannedWindow(pair, 0, 1, int(runs.length[0]))
                continue
            ends = np.cumsum(runs.length)
            first, begin = 0, 0
            while first < ends.size:
                end = max(bisect_right(ends, begin + window_bytes, first), first + 1)
                yield PlannedWindow(pair, first, end - first, int(ends[end - 1]) - begin)
                first, begin = end, int(ends[end - 1])

    def _band(self, group: int) -> int:
        # Return the index of the band of layers that a group belongs to.
        #
        # Raises IndexError for a group that does not exist.
        if not 0 <= group < self.groups:
            raise IndexError(
                f"there is no layer group {group}; the transfer plan has {self.groups}"
            )
        return group // len(self._chunk_tokens)


def plan_transfer(
    src: KvLayout,
    dst: KvLayout,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    tokens: int,
    *,
    skip_tokens: int = 0,
    group_layers: int | None = None,
    max_run_bytes: int = MAX_RUN_BYTES,
    max_runs: int = MAX_RUNS,
    ranks: Ranks = ALL_RANKS,
) -> TransferPlan:
    """Plan how the KV of a request's tokens [skip_tokens, tokens) is copied from `src` to `dst`.

    src_blocks     the request's blocks at the source, in token order from token 0 on; the same on
                   every rank
    dst_blocks     the request's blocks at the sink, in the same way
    group_layers   layers per group; None: by `layers_per_group`
    max_run_bytes  maximum length of a byte range (run)
    max_runs       maximum number of byte ranges of a rank pair in a group; the tokens of one block
                   may need more
    ranks          plan only what these ranks copy

    Each byte of these tokens is copied exactly once to every rank of the sink that needs it. The
    rest of the last block is copied too, up to the nearest block end on either side, because a
    whole block is one byte range. Nothing before `skip_tokens` is written.

    If several source ranks hold the same heads, they are used in turn. If `ranks` names one source
    rank, its part is always the same (`source_ranks`).

    Raises LayoutMismatch if the layouts cannot be converted. Raises ValueError if the blocks cannot
    hold the tokens, or if the named ranks have no KV in common.
    """
    limits = _Limits(max_run_bytes, max_runs)
    outline = _outline(_Request(src, dst, skip_tokens, tokens, group_layers, limits, ranks))
    from_blocks = _checked(src_blocks, src, tokens, "source")
    to_blocks = _checked(dst_blocks, dst, tokens, "sink")
    if sorted_distinct(to_blocks).size != to_blocks.size:
        raise ValueError("the sink's list of blocks contains a block twice")
    if outline.place is not None:
        return TransferPlan(outline, outline.place.blocks(from_blocks, to_blocks))
    return TransferPlan(outline, split_segments(src, dst, from_blocks, to_blocks, outline.tokens))


# Requests of few blocks often have the same number of tokens.
@lru_cache(64)
def _outline(request: _Request) -> _Outline:
    # Return what all plans of such a request have in common. Raises LayoutMismatch or ValueError.
    src, dst, skip_tokens, tokens, group_layers, limits, ranks = request
    _check_range(src, dst, skip_tokens, tokens)
    if group_layers is None:
        group_layers = layers_per_group(src, tokens - skip_tokens)
    if min(group_layers, *limits) < 1:
        raise ValueError(
            f"group_layers {group_layers}, max_run_bytes {limits.run_bytes} "
            f"and max_runs {limits.runs} must be at least 1"
        )
    end = min(-(-tokens // layout.block_tokens) * layout.block_tokens for layout in (src, dst))
    division = _divide(src, dst, group_layers, ranks)
    if not sum(division.token_bytes):
        raise ValueError(f"source rank {ranks.src} has no KV for sink rank {ranks.dst}")
    covered = range(skip_tokens, end)
    place = SegmentPlace.of(src, dst, covered)
    return _Outline(src, dst, covered, group_layers, limits, division, place)


def _check_range(src: KvLayout, dst: KvLayout, skip_tokens: int, tokens: int) -> None:
    # Raise LayoutMismatch or ValueError if KV of this range cannot be copied between the layouts.
    reason = dst.mismatch(src)
    if reason is not None:
        raise LayoutMismatch(reason)
    if not 0 <= skip_tokens < tokens:
        raise ValueError(f"{skip_tokens} to {tokens} is not a valid range of tokens")
    if src.content is KvContent.PAGES and skip_tokens % src.block_tokens:
        raise ValueError(
            f"a transfer of whole pages of {src.block_tokens} tokens cannot begin "
            f"at token {skip_tokens}"
        )


def source_ranks(src: KvLayout, dst: KvLayout, dst_rank: int) -> list[int]:
    """Return the sending engine's ranks from which the receiving engine's rank `dst_rank` fetches.

    It is used if each rank has a transfer agent of its own.

    src, dst  layouts of the two engines
    """
    return sorted({pair.src_rank for pair in _rank_pairs(src, dst) if pair.dst_rank == dst_rank})


def sink_ranks(src: KvLayout, dst: KvLayout, src_rank: int | None) -> list[int]:
    """Return the receiving engine's ranks that fetch KV from the sending engine's rank `src_rank`.

    src, dst  layouts of the two engines
    src_rank  None: return the ranks that fetch from any rank
    """
    return sorted(
        {pair.dst_rank for pair in _rank_pairs(src, dst) if src_rank in (None, pair.src_rank)}
    )


def _rank_pairs(src: KvLayout, dst: KvLayout) -> list[RankPair]:
    # Return all rank pairs that move bytes if every source rank is an agent of its own.
    stages = [(a, b) for a, b, _ in _common_layers(src, dst, range(src.layers))]
    heads = [(a, b) for a, b, _ in _common_heads(src, dst, 0)]
    return [
        RankPair(src_stage * src.tp + src_tp, dst_stage * dst.tp + dst_tp)
        for src_stage, dst_stage in stages
        for src_tp, dst_tp in heads
    ]


def layers_per_group(layout: KvLayout, tokens: int, group_bytes: int = GROUP_BYTES) -> int:
    """Return the smallest number of layers that together have `group_bytes` bytes of KV.

    Layers are sent in groups of this size, so that the connection is kept busy.

    tokens  number of tokens whose KV is sent
    """
    layer_bytes = tokens * layout.bytes_per_token // layout.layers
    return min(layout.layers, max(1, -(-group_bytes // max(1, layer_bytes))))


@lru_cache(64)
def max_pairs(src: KvLayout, dst: KvLayout, group_layers: int) -> int:
    """Return an upper limit of the number of rank pairs that planning a transfer has to consider.

    The time to compute a plan grows with this number, whatever the number of blocks.

    src, dst  layouts of source and sink
    """
    bands = -(-src.layers // group_layers)
    # Each layer at which a group or a stage begins adds one division.
    common = bands + src.pp + dst.pp - 2
    copies = max(1, src.tp // src.kv_heads)
    return bands * src.pp * dst.pp + common * src.tp // copies * dst.tp


def _checked(blocks: Blocks, layout: KvLayout, tokens: int, side: str) -> Offsets:
    numbers = np.asarray(blocks)
    count = -(-tokens // layout.block_tokens)
    if numbers.ndim != 1 or numbers.size < count:
        raise ValueError(f"{tokens} tokens do not fit into the {numbers.size} blocks of the {side}")
    numbers = numbers[:count]
    limit = layout.blocks or _MOST_BLOCK
    if count == 1 and numbers.dtype is _INT64 and 0 <= numbers.item() < limit:
        return numbers.copy()
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= limit:
        raise ValueError(f"the {side}'s list of blocks contains an invalid block number")
    return numbers.astype(np.int64)


def _chunks(outline: _Outline, segments: Segments) -> list[Segments]:
    # Return the segments cut into chunks, so that no rank pair exceeds its limit of byte ranges
    # (runs).
    #
    # Runs that will join are counted separately.
    if segments.tokens.size == 1:
        return [segments]
    src, dst, limits = outline.src, outline.dst, outline.limits
    share_by_shape = {
        (
            len(share.layers),
            len(share.heads),
            share.pair.src_rank // src.tp,
            share.pair.dst_rank // dst.tp,
        ): share
        for band in outline.division.shares
        for share in band
    }.values()
    lengths = sorted_distinct(segments.tokens)
    most = np.array(
        [
            max(
                (
                    max_runs(src, dst, share, int(length), limits.run_bytes)
                    for share in share_by_shape
                ),
                default=1,
            )
            for length in lengths
        ]
    )
    runs = most[np.searchsorted(lengths, segments.tokens)]
    fills = (np.cumsum(runs) - runs) // limits.runs
    cuts = [0, *(np.flatnonzero(np.diff(fills)) + 1).tolist(), fills.size]
    return [Segments(*(column[a:b] for column in segments)) for a, b in pairwise(cuts)]


# Every transfer between two engines has one of few numbers of layers per group.
@lru_cache(16)
def _divide(src: KvLayout, dst: KvLayout, group_layers: int, ranks: Ranks) -> _Division:
    bands = tuple(_bands(src, group_layers))
    shares = tuple(
        tuple(_shares(src, dst, band, layers, ranks)) for band, layers in enumerate(bands)
    )
    pairs = tuple(tuple(share.pair for share in of_band) for of_band in shares)
    row = src.parts * src.row_bytes
    rows = (sum(len(share.layers) * len(share.heads) for share in of_band) for of_band in shares)
    token_bytes = tuple(row * count for count in rows)
    return _Division(bands, shares, pairs, token_bytes, max(map(len, shares)))


def _bands(layout: KvLayout, group_layers: int) -> list[range]:
    return [
        range(first, min(first + group_layers, layout.layers))
        for first in range(0, layout.layers, group_layers)
    ]


def _shares(
    src: KvLayout, dst: KvLayout, band: int, layers: range, ranks: Ranks
) -> Iterator[PairShare]:
    shares = []
    turn = band if ranks.src is None else 0
    for src_stage, dst_stage, common in _common_layers(src, dst, layers):
        for src_tp, dst_tp, heads in _common_heads(src, dst, turn):
            pair = RankPair(src_stage * src.tp + src_tp, dst_stage * dst.tp + dst_tp)
            if ranks.src in (None, pair.src_rank) and ranks.dst in (None, pair.dst_rank):
                shares.append(PairShare(pair, common, heads))
    return iter(sorted(shares, key=lambda share: share.pair))


def _common_layers(src: KvLayout, dst: KvLayout, layers: range) -> Iterator[tuple[int, int, range]]:
    for src_stage in range(src.pp):
        for dst_stage in range(dst.pp):
            common = _overlap(_overlap(src.layers_of(src_stage), dst.layers_of(dst_stage)), layers)
            if common:
                yield src_stage, dst_stage, common


def _common_heads(src: KvLayout, dst: KvLayout, band: int) -> Iterator[tuple[int, int, range]]:
    copies = max(1, src.tp // src.kv_heads)
    sinks = max(1, dst.tp // dst.kv_heads)
    for dst_tp in range(dst.tp):
        wanted = dst.heads_of(dst_tp)
        copy = (dst_tp % sinks * copies // sinks + band) % copies
        for src_tp in range(copy, src.tp, copies):
            heads = _overlap(src.heads_of(src_tp), wanted)
            if heads:
                yield src_tp, dst_tp, heads


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
