"""An index of the prompt prefixes that each endpoint is believed to have cached.

PrefixIndex maps block keys to the slots (small numbers) of the endpoints that have the block.
Entries age like those of the engines' own LRU caches, and memory is bounded. fingerprint.py
computes the keys; scorers.py uses the result.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

import msgspec

from policies.prefix.fingerprint import Fingerprint
from policies.prefix.holder_tables import HolderTables
from policies.prefix.predicted_cache import MAX_SLOTS, PredictedCache
from policies.prefix.prefix_match import PrefixMatch, WideMatch
from policies.prefix.sampled_keys import SAMPLE_LENGTHS, Keys

BLOCK_COST_BYTES = 192
"""Upper bound of the memory of one block, in bytes.

It consists of a dict entry after a resize, the key, and an int with up to eight holders. Most
blocks share their int with neighbours and cost half.
"""

LEAST_CAP_BYTES = 64 * BLOCK_COST_BYTES


_SLOT = MAX_SLOTS - 1
_LANE_BITS = 64
_LANE = (1 << _LANE_BITS) - 1
_MOST_IN_ENTRY = 8
"""Number of holders (endpoints that have cached a block) up to which they are packed into one int.

Each takes one lane of its bits. More have a table.
"""

_MOST_OTHERS = (1 << (_MOST_IN_ENTRY - 1) * _LANE_BITS) - 1
"""The largest packed value to which one more holder can be added."""

_FEW = 4
"""Number of holders in a table from which on they are packed into an int again."""

_MOST_NARROW = 8
"""Number of holders of a prefix up to which a lookup lists them."""

_LENGTH = itemgetter(1)
_MOST_SHARDS = 256
_LEAST_TRUST, _DISTRUST, _TRUST = 1 / 8, 0.95, 1.02
_TOLERANCE = 0.1


_Run = tuple[int, int, int, int]
"""Consecutive blocks with the same holders, as a tuple.

The end, the holders, the holders without the inserting slot, and that slot's old stamp. The last
two are 0 if the holders have a table.
"""


class IndexStats(msgspec.Struct, frozen=True):
    """The size and activity of a prefix index.

    bytes          memory in use
    blocks         number of entries
    evictions      entries dropped because of the memory limit
    cached_tokens  tokens that each endpoint is believed to have cached, by slot
    """

    bytes: int
    blocks: int
    evictions: int
    cached_tokens: tuple[int, ...]


class PrefixIndex:
    """Remembers which endpoints are believed to have which beginnings of prompts cached.

    A prompt is a chain of block keys (Fingerprint). The index maps each key to the slots (numbers)
    of the endpoints that have the block. Use it from one event loop. It survives reloads of the
    configuration.

    Age: an entry has a stamp, `generation << 16 | slot`, which shows when the endpoint last used
    the block. Each slot counts its own generations; one ends when 1/32 of the engine's capacity has
    been stamped with it. A block that is used again gets a new stamp. If a slot's valid stamps
    exceed its capacity, its oldest generation expires: one number (`_oldest_alive[slot]`) is moved.
    No entry is visited, because expired stamps are recognised when they are read.

    Storage: the stamps of up to eight holders of a block are packed into one Python int (64 bits
    each), which the garbage collector does not visit, and which consecutive blocks share. If there
    are more, the int is the negative number of a table (HolderTables). Along a prompt, stamps only
    get older and holders fewer, because using a block uses all blocks before it. So a binary search
    finds the end of a slot's match.

    Memory: entries are in up to 256 dicts by key, so that no resize blocks the event loop for more
    than about a millisecond. A block counts BLOCK_COST_BYTES, and tables count in addition. At
    `cap_bytes`, the oldest quarter of one dict is dropped, which only loses hints. Raises
    ValueError if `cap_bytes` is too small.
    """

    __slots__ = (
        *(
            "_blocks",
            "_cap_bytes",
            "_evictions",
            "_holders",
            "_most_blocks",
            "_next_to_trim",
        ),
        *("_oldest_alive", "_shard_mask", "_shards", "tables"),
    )

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < LEAST_CAP_BYTES:
            raise ValueError(
                f"the size of a prefix index must be at least {LEAST_CAP_BYTES} bytes, not "
                f"{cap_bytes}"
            )
        self._cap_bytes = cap_bytes
        self._most_blocks = cap_bytes // BLOCK_COST_BYTES
        shards = _MOST_SHARDS
        while shards > 1 and self._most_blocks < 64 * shards:
            shards //= 2
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self._shard_mask = shards - 1
        self._next_to_trim = 0
        self._holders: list[PredictedCache] = []
        self._oldest_alive: list[int] = []
        self.tables = HolderTables()
        self._blocks = 0
        self._evictions = 0

    # -- reading

    def match(self, fingerprint: Fingerprint, prompt_tokens: int) -> list[int]:
        """Return how many tokens of the prompt each endpoint is believed to have cached, by slot.

        Bytes are converted to tokens by `prompt_tokens / fingerprint.n_bytes`. The list may be
        shorter than the number of slots: slots that were never used are missing at its end.
        """
        tokens, keys = [0] * len(self._holders), fingerprint.sampled_keys
        known = self._count_known(keys) if keys else 0
        if known:
            scale = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
            for slot, blocks in self._measure_reach(keys, known - 1).items():
                # float.__trunc__() takes a third of the time of int().
                tokens[slot] = (blocks * scale).__trunc__()
        return tokens

    def match_holders(self, fingerprint: Fingerprint, prompt_tokens: int) -> PrefixMatch:
        """Return the endpoints that are believed to have part of the prompt cached, as a
        PrefixMatch.

        The numbers are the same as from `match`, but no list of all slots is created.
        """
        keys = fingerprint.sampled_keys
        known = self._count_known(keys)
        if not known:
            return PrefixMatch(len(self._holders), {}, (), 0)
        narrow, wide = self._measure_levels(keys, known - 1)
        scale = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
        # float.__trunc__() takes a third of the time of int().
        tokens = {slot: (blocks * scale).__trunc__() for slot, blocks in narrow.items()}
        levels = sorted(wide.items(), key=_LENGTH, reverse=True) if len(wide) > 1 else wide.items()
        tables, oldest = self.tables.stamps, self._oldest_alive
        return PrefixMatch(
            len(self._holders),
            tokens,
            [WideMatch(int(blocks * scale), tables[table], oldest) for table, blocks in levels],
            max(tokens.values()) if tokens else 0,
        )

    def _measure_levels(self, keys: Keys, last: int) -> tuple[dict[int, int], dict[int, int]]:
        # Return how many blocks of a prompt the slots hold, in two dicts.
        #
        # The first is by slot, for blocks with few holders. The second is by the number of the
        # table of holders, for blocks with many.
        narrow: dict[int, int] = {}
        wide: dict[int, int] = {}
        first_holders, last_holders = self._holders_of(keys[0]), self._holders_of(keys[last])
        self._add_level(last_holders, SAMPLE_LENGTHS[last], narrow, wide)
        pending = [(0, first_holders, last, last_holders)]
        while pending:
            low, at_low, high, at_high = pending.pop()
            if at_low == at_high:
                continue
            if high - low > 1:
                middle = (low + high) // 2
                at_middle = self._holders_of(keys[middle])
                pending += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
            else:
                self._add_level(at_low, SAMPLE_LENGTHS[low], narrow, wide)
        for table, blocks in wide.items():
            self.tables.lengthen(narrow, table, blocks, self._oldest_alive)
        return narrow, wide

    def _add_level(
        self, holders: int, blocks: int, narrow: dict[int, int], wide: dict[int, int]
    ) -> None:
        # Note that these holders have the first `blocks` blocks of a prompt.
        if holders < 0 and len(self.tables.stamps[holders]) > _MOST_NARROW:
            wide[holders] = max(wide.get(holders, 0), blocks)
            return
        for slot in self._alive(holders):
            if narrow.get(slot, 0) < blocks:
                narrow[slot] = blocks

    def _has_stamp(self, holders: int, stamp: int) -> bool:
        if holders < 0:
            return self.tables.stamps[holders].get(stamp & _SLOT) == stamp
        return holders == stamp or (holders > _LANE and stamp in _stamps(holders))

    def stamps_of(self, holders: int) -> list[int]:
        """Return the stamps that an entry of the index stands for, at most one per slot."""
        return list(self.tables.stamps[holders].values()) if holders < 0 else _stamps(holders)

    def cached_tokens(self, slot: int) -> float:
        """Return how many tokens the endpoint in this slot is believed to have cached in total."""
        return self._holders[slot].held if slot < len(self._holders) else 0.0

    def eviction_regret(self, slot: int) -> float:
        """Return the share (0 to 1) of an endpoint's evicted prompt tokens that were requested
        again.

        To count them, an entry without valid holders stays in the index (a ghost list) until its
        key is used again or the memory limit drops it. The share decays over as many evictions as
        the endpoint's cache holds.
        """
        return self._holders[slot].regret() if slot < len(self._holders) else 0.0

    def _measure_reach(self, keys: Keys, last: int) -> dict[int, int]:
        # Return how many blocks of a prompt each slot holds, by slot.
        #
        # Bisects only where the holders of blocks change.
        first_holders, last_holders = self._holders_of(keys[0]), self._holders_of(keys[last])
        at_end = self._alive(last_holders)
        reach = dict.fromkeys(at_end, SAMPLE_LENGTHS[last])
        if first_holders == last_holders:  # the same endpoints hold the whole prefix
            return reach
        alive = {first_holders: self._alive(first_holders), last_holders: at_end}
        pending = [(0, first_holders, last, last_holders)]
        while pending:
            low, at_low, high, at_high = pending.pop()
            if at_low == at_high or len(alive[at_low]) == len(alive[at_high]):
                continue
            if high - low > 1:
                middle = (low + high) // 2
                at_middle = self._holders_of(keys[middle])
                if at_middle not in alive:
                    alive[at_middle] = self._alive(at_middle)
                pending += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
                continue
            length = SAMPLE_LENGTHS[low]
            for slot in alive[at_low]:
                if reach.get(slot, 0) < length:
                    reach[slot] = length
        return reach

    def _holders_of(self, key: int) -> int:
        return self._shards[key & self._shard_mask].get(key, 0)

    def _alive(self, holders: int) -> list[int]:
        oldest = self._oldest_alive
        if holders < 0:
            stamps = self.tables.stamps[holders].items()
            return [slot for slot, stamp in stamps if stamp >= oldest[slot]]
        if holders <= _LANE:
            slot = holders & _SLOT
            return [slot] if holders >= oldest[slot] else []
        return [stamp & _SLOT for stamp in _stamps(holders) if stamp >= oldest[stamp & _SLOT]]

    def _count_known(self, keys: Keys) -> int:
        # Return how many of the keys, from the first on, have an entry; found by bisection.
        shards, mask = self._shards, self._shard_mask
        low, high = 0, len(keys)
        if high:
            key = keys[high - 1]
            if key in shards[key & mask]:
                return high
            high -= 1
        while low < high:
            middle = (low + high) // 2
            key = keys[middle]
            if key in shards[key & mask]:
                low = middle + 1
            else:
                high = middle
        return low

    # -- learning

    def insert(self, fingerprint: Fingerprint, slot: int, prompt_tokens: int) -> None:
        """Record that this prompt was sent to the endpoint in this slot, which caches all of it.

        The time depends only on the number of blocks that are new or were not used for long.
        """
        if fingerprint.sampled_keys:
            tokens_per_block = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
            self.insert_keys(fingerprint.sampled_keys, slot, tokens_per_block)

    def insert_keys(self, keys: Keys, slot: int, tokens_per_block: float) -> None:
        """Record that a prompt was sent to an endpoint, like `insert`, but by its sampled keys.

        There must be at least one key (sampled_keys.py).
        """
        holder = self._holder(slot)
        if len(keys) > self._most_blocks:
            keys = keys[: self._most_blocks]
        # as if all keys were new: dropping entries may drop some of these
        self._make_room(len(keys))
        fresh, runs = self._stamp(keys, holder.stamp)
        if runs:
            self._record_runs(keys, fresh, runs, holder, tokens_per_block)
            if self.tables.bytes:
                self._make_room(0)
            self._oldest_alive[slot] = holder.oldest_alive()

    def _stamp(self, keys: Keys, stamp: int) -> tuple[int, list[_Run]]:
        # Stamp blocks from the last to the first, until one has the stamp already.
        #
        # All blocks before that one have it too. Stamped blocks move to the young end of their
        # dict. Blocks with a table keep it: _record_runs renews it. Return the number of blocks
        # before them, and the runs of blocks that had equal holders.
        shards, mask = self._shards, self._shard_mask
        runs: list[_Run] = []
        run: int | None = None
        renewed = 0
        for end in range(len(keys), 0, -1):
            key = keys[end - 1]
            shard = shards[key & mask]
            holders = shard.pop(key, 0)
            if holders != run:
                if self._has_stamp(holders, stamp):
                    shard[key] = holders
                    return end, runs
                run = holders
                if holders < 0:
                    renewed = holders
                    runs.append((end, holders, 0, 0))
                else:
                    renewed, previous = self._without(holders, stamp & _SLOT)
                    runs.append((end, holders, renewed, previous))
                    renewed = renewed << _LANE_BITS | stamp
            shard[key] = renewed
        return 0, runs

    def _record_runs(
        self,
        keys: Keys,
        fresh: int,
        runs: list[_Run],
        holder: PredictedCache,
        tokens_per_block: float,
    ) -> None:
        # Move these runs of blocks to the holder's newest generation.
        #
        # Blocks that no slot held any more also count as missed by the slots that evicted them.
        lengths, oldest = SAMPLE_LENGTHS, self._oldest_alive[holder.stamp & _SLOT]
        low, covered = fresh, lengths[fresh - 1] if fresh else 0
        holder.add_tokens((lengths[runs[0][0] - 1] - covered) * tokens_per_block)
        for end, holders, others, previous in reversed(runs):
            tokens = (lengths[end - 1] - covered) * tokens_per_block
            if holders < 0:
                self._renew_table(keys[low:end], holders, holder, tokens)
            elif holders:
                holder.remove_tokens(previous, tokens)
                if not others and previous < oldest:
                    self._count_missed(_stamps(holders), tokens)
                if others > _MOST_OTHERS:
                    stamps = _stamps(others << _LANE_BITS | holder.stamp)
                    self._store(keys[low:end], self.tables.create(stamps, end - low))
            else:
                self._blocks += end - low
            low, covered = end, lengths[end - 1]

    def _renew_table(self, keys: Keys, table: int, holder: PredictedCache, tokens: float) -> None:
        # Move the blocks with these keys, whose holders are in a table, to the holder's newest
        # generation. The table is changed in place, unless other blocks use it too.
        tables, slot, oldest = self.tables, holder.stamp & _SLOT, self._oldest_alive
        stamps = tables.stamps[table]
        previous = stamps.get(slot, 0)
        holder.remove_tokens(previous, tokens)
        if previous < oldest[slot] and not any(
            stamp >= oldest[other] for other, stamp in stamps.items()
        ):
            self._count_missed(list(stamps.values()), tokens)
        renewed = table
        if not tables.is_used_only_by(table, len(keys)):
            renewed = tables.create(stamps.values(), len(keys))
            tables.release(table, len(keys))
        tables.renew(renewed, holder.stamp, oldest)
        if len(tables.stamps[renewed]) <= _FEW:
            packed = _pack(self.stamps_of(renewed))
            tables.release(renewed, len(keys))
            renewed = packed
        if renewed != table:
            self._store(keys, renewed)

    def _store(self, keys: Keys, holders: int) -> None:
        # Set the holders of these blocks, which are in the index.
        for key in keys:
            self._shards[key & self._shard_mask][key] = holders

    def _count_missed(self, stamps: list[int], tokens: float) -> None:
        for stamp in stamps:
            holder = self._holders[stamp & _SLOT]
            if stamp >= holder.reborn:
                holder.missed += tokens

    def _without(self, holders: int, slot: int) -> tuple[int, int]:
        # Return the valid holders other than `slot`, and the stamp that slot had (0: none).
        others = previous = 0
        for stamp in _stamps(holders):
            if stamp & _SLOT == slot:
                previous = stamp
            elif stamp >= self._oldest_alive[stamp & _SLOT]:
                others = others << _LANE_BITS | stamp
        return others, previous

    def _stride(self, rung: int) -> int:
        return SAMPLE_LENGTHS[rung] - (SAMPLE_LENGTHS[rung - 1] if rung else 0)

    def trim(
        self, fingerprint: Fingerprint, slot: int, kept_tokens: int, prompt_tokens: int
    ) -> None:
        """Remove the end of a prompt from the index: its endpoint failed while computing it.

        The endpoint has cached at most the first `kept_tokens` tokens.
        """
        if fingerprint.sampled_keys:
            tokens_per_block = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
            self.trim_keys(fingerprint.sampled_keys, slot, kept_tokens, tokens_per_block)

    def trim_keys(self, keys: Keys, slot: int, kept_tokens: int, tokens_per_block: float) -> None:
        """Do what trim() does, for a prompt of which only the sampled keys are known.

        keys              some of its block keys (sampled_keys.py)
        slot              the number of the endpoint
        kept_tokens       tokens at its beginning that the endpoint may have cached
        tokens_per_block  tokens of each block
        """
        if slot >= len(self._holders):
            return
        first = bisect_right(
            SAMPLE_LENGTHS, kept_tokens / tokens_per_block if tokens_per_block else 0
        )
        run = others = previous = 0
        for rung, key in enumerate(keys[first:], first):
            holders = self._holders_of(key)
            if holders:
                if holders != run:
                    run = holders
                    others, previous = self._trimmed(holders, slot)
                self._holders[slot].remove_tokens(previous, self._stride(rung) * tokens_per_block)
                self._replace(key, holders, others)
        self._make_room(0)  # for tables

    def _trimmed(self, holders: int, slot: int) -> tuple[int, int]:
        # Return the valid holders other than `slot`, and the stamp that slot had (0: none).
        if holders >= 0:
            return self._without(holders, slot)
        stamps, oldest = self.tables.stamps[holders], self._oldest_alive
        if slot not in stamps:
            return holders, 0
        others = [
            stamp for other, stamp in stamps.items() if other != slot and stamp >= oldest[other]
        ]
        return self.pack_or_tabulate(others), stamps.get(slot, 0)

    def pack_or_tabulate(self, stamps: list[int]) -> int:
        """Return the value of an entry with these stamps: them, packed, or a table's number."""
        return self.tables.create(stamps, 0) if len(stamps) > _MOST_IN_ENTRY else _pack(stamps)

    def has_block(self, key: int) -> bool:
        """Return whether the index has an entry for a block."""
        return key in self._shards[key & self._shard_mask]

    def add_block(self, key: int, holders: int) -> None:
        """Add an entry for a new block, with the value that `pack_or_tabulate` returned."""
        self._shards[key & self._shard_mask][key] = holders
        self._blocks += 1
        if holders < 0:
            self.tables.add_block(holders)

    def _replace(self, key: int, holders: int, others: int) -> None:
        # Set the holders of a block to `others`, or remove the block if there are none.
        shard = self._shards[key & self._shard_mask]
        if others:
            shard[key] = others
        else:
            del shard[key]
            self._blocks -= 1
        if others < 0:
            self.tables.add_block(others)
        if holders < 0:
            self.tables.release(holders)

    def confirm(self, slot: int, believed_share: float, cached_share: float) -> None:
        """Learn from an answer how large an endpoint's cache is: how much of the prompt was cached?

        slot            the number of the endpoint
        believed_share  share (0 to 1) of the prompt that was expected to be cached
        cached_share    share that the engine reported

        Engines evict the oldest blocks first. So a smaller share than expected means that the cache
        is smaller than assumed, because running requests use the same memory. The assumed capacity
        then shrinks by 5 %. It grows by 2 % with every correct expectation. If the capacity is
        unknown, the first estimate is the slot's present content.
        """
        if slot >= len(self._holders) or believed_share <= _TOLERANCE:
            return
        holder = self._holders[slot]
        if cached_share >= believed_share - _TOLERANCE:
            holder.trust = min(1.0, holder.trust * _TRUST)
            return
        if holder.capacity_tokens is None:
            holder.capacity_tokens = holder.held
        holder.trust = max(_LEAST_TRUST, holder.trust * _DISTRUST)
        self._oldest_alive[slot] = holder.oldest_alive()

    def set_capacity(self, slot: int, tokens: int | None) -> None:
        """Set how many tokens of KV the endpoint in this slot can store; None: unknown.

        Blocks beyond the capacity expire, oldest first.
        """
        holder = self._holder(slot)
        holder.capacity_tokens = None if tokens is None else float(tokens)
        self._oldest_alive[slot] = holder.oldest_alive()

    def forget(self, slot: int) -> None:
        """Remove all entries of a slot, because its endpoint was restarted or removed.

        The call takes constant time. The capacity stays as last set by `set_capacity`, without the
        reductions made by `confirm`.
        """
        if slot < len(self._holders):
            self._holders[slot].empty()
            self._oldest_alive[slot] = self._holders[slot].stamp

    def clear(self) -> None:
        """Remove all blocks, but keep what is known of each slot."""
        for shard in self._shards:
            shard.clear()
        self._blocks, self.tables = 0, HolderTables()

    # -- memory

    def stats(self) -> IndexStats:
        """Return the size and activity of the prefix index.

        Call it for scrapes, not per request: it reads the size of every dict.
        """
        key_bytes = sys.getsizeof(_LANE) + 12
        used = sum(map(sys.getsizeof, self._shards)) + self._blocks * key_bytes + self.tables.bytes
        return IndexStats(
            used, self._blocks, self._evictions, tuple(int(holder.held) for holder in self._holders)
        )

    def _holder(self, slot: int) -> PredictedCache:
        if not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"the slot of an endpoint must be 0 to {MAX_SLOTS - 1}, not {slot}")
        while slot >= len(self._holders):
            self._holders.append(PredictedCache(len(self._holders)))
            self._oldest_alive.append(self._holders[-1].stamp)
        return self._holders[slot]

    def _make_room(self, blocks: int) -> None:
        tables = self.tables
        while (self._blocks + blocks) * BLOCK_COST_BYTES + tables.bytes > self._cap_bytes:
            shard = self._shards[self._next_to_trim]
            dropped = (len(shard) + 3) // 4
            if min(islice(shard.values(), dropped), default=0) < 0:
                for holders in islice(shard.values(), dropped):
                    if holders < 0:
                        tables.release(holders)
            self._shards[self._next_to_trim] = dict(islice(shard.items(), dropped, None))
            self._next_to_trim = (self._next_to_trim + 1) & self._shard_mask
            self._blocks -= dropped
            self._evictions += dropped


def _pack(stamps: Sequence[int]) -> int:
    # Return stamps packed into a holders int, which _stamps() reverses.
    return int.from_bytes(array("Q", stamps).tobytes(), sys.byteorder)


def _stamps(holders: int) -> list[int]:
    # Return the list of stamps packed into one int, at most one per slot.
    if holders <= _LANE:
        return [holders] if holders else []
    lanes = (holders.bit_length() + _LANE_BITS - 1) // _LANE_BITS
    return memoryview(holders.to_bytes(lanes * 8, sys.byteorder)).cast("Q").tolist()
