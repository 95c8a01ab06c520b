"""PrefixIndex: what each endpoint is believed to hold in its prefix cache.

Lives here: block key -> who holds it, ageing after the engines' own LRU, the memory cap. Not here: how a prompt
becomes keys (fingerprint.py), or what a belief is worth in a decision (scorers.py).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from itertools import islice

import msgspec

from policies.fingerprint import Fingerprint
from policies.rungs import LENGTHS, Keys

BLOCK_COST_BYTES = 192
"""What one remembered block may cost: its dict entry just after growth (55), the key (48), and a holders number of its
own with up to eight holders. Most blocks share their holders with their neighbours and cost about half."""

HOLDER_COST_BYTES = 9
"""What each holder beyond the eighth adds to that: 64 bits, of which an int keeps 30 in 4 bytes."""

LEAST_CAP_BYTES = 64 * BLOCK_COST_BYTES

MAX_SLOTS = 1 << 16

_SLOT = MAX_SLOTS - 1
_LANE_BITS = 64
_LANE = (1 << _LANE_BITS) - 1
_HOLDERS_IN_COST = 8
_MOST_IN_COST = (1 << _HOLDERS_IN_COST * _LANE_BITS) - 1
_ROOM_FOR_ONE = _MOST_IN_COST >> _LANE_BITS
_MOST_SHARDS = 256
_GENERATIONS = 32
_LEAST_TRUST, _DISTRUST, _TRUST = 1 / 8, 0.95, 1.02
_TOLERANCE = 0.1
_NOTHING = 1e-6


_Run = tuple[int, int, int, int]
"""Neighbouring blocks: where they end, their holders, those other than the one who has them now, its stamp before."""


class IndexStats(msgspec.Struct, frozen=True):
    """bytes: memory in use; blocks: entries; evictions: entries dropped at the cap; held_tokens: believed, per slot."""

    bytes: int
    blocks: int
    evictions: int
    held_tokens: tuple[int, ...]


class _Holder:
    """One slot's book: how much it is believed to hold, by generation. A generation's name is its stamp.

    `evicted` are tokens that aged out, `missed` those of them that were asked for again while nobody held them; both
    fade over as many evictions as the slot has room for. What died before stamp `reborn` was no eviction.
    """

    __slots__ = ("capacity_tokens", "evicted", "held", "missed", "reborn", "stamp", "tokens", "trust")

    def __init__(self, slot: int) -> None:
        self.stamp = MAX_SLOTS | slot
        self.tokens: dict[int, float] = {self.stamp: 0.0}
        self.held = 0.0
        self.capacity_tokens: float | None = None
        self.trust = 1.0
        self.evicted = self.missed = 0.0
        self.reborn = self.stamp

    def next_generation(self) -> None:
        self.stamp += MAX_SLOTS
        self.tokens[self.stamp] = 0.0

    def empty(self) -> None:
        self.stamp += MAX_SLOTS
        self.tokens = {self.stamp: 0.0}
        self.held, self.trust = 0.0, 1.0
        self.evicted = self.missed = 0.0
        self.reborn = self.stamp

    def gain(self, tokens: float) -> None:
        self.tokens[self.stamp] += tokens
        self.held += tokens

    def lose(self, stamp: int, tokens: float) -> None:
        """A generation of which nothing is left goes, unless it gains still or says who is alive, being the oldest."""
        known = self.tokens.get(stamp, 0.0)
        if known - tokens > _NOTHING:
            self.tokens[stamp] = known - tokens
            self.held -= tokens
        elif known:
            self.held -= known
            if stamp == self.stamp or stamp == next(iter(self.tokens)):
                self.tokens[stamp] = 0.0
            else:
                del self.tokens[stamp]

    def oldest_alive(self) -> int:
        """The oldest stamp alive, after beginning a generation if this is full and ending those beyond the room."""
        if self.capacity_tokens is not None:
            room = self.capacity_tokens * self.trust
            if self.tokens[self.stamp] * _GENERATIONS > room:
                self.next_generation()
            while self.held > room and len(self.tokens) > 1:
                self._evict(self.tokens.pop(next(iter(self.tokens))), self.capacity_tokens)
        return next(iter(self.tokens))

    def _evict(self, tokens: float, capacity_tokens: float) -> None:
        self.held = max(0.0, self.held - tokens)
        fading = max(0.0, 1.0 - tokens / capacity_tokens) if capacity_tokens > tokens else 0.0
        self.evicted = self.evicted * fading + tokens
        self.missed *= fading

    def regret(self) -> float:
        """Share of the evictions, 0 to 1, that turned out a pity. Few evictions say little: they count as harmless."""
        if not self.missed or self.capacity_tokens is None:
            return 0.0
        return min(1.0, self.missed / (self.evicted + 0.1 * self.capacity_tokens))


class PrefixIndex:
    """Block key -> stamps of the slots believed to hold the block. Owned by one event loop; outlives reloads.

    A stamp is `generation << 16 | slot`. Each slot counts its own generations: one ends when 1/32 of the engine's
    capacity has been stamped with it. A block met again is stamped anew, which is what touching does in an engine's
    LRU; when a slot's live stamps add up to more than its capacity its oldest generation dies, by moving one number
    (`_oldest_alive[slot]`) past it. Nothing is walked: dead stamps are seen as dead when read.

    The stamps of all holders of a block lie side by side in one Python int (64 bits each): an int is invisible to the
    garbage collector, and a run of blocks shares one object. Along a chain stamps only get older and holders fewer,
    because whoever touches a block touches all before it; so the end of anyone's belief is found by halving.

    Memory: entries are spread over up to 256 dicts by key, so that no growth stalls the loop for more than about a
    millisecond; at `cap_bytes` (counted at BLOCK_COST_BYTES per block, and HOLDER_COST_BYTES per holder beyond eight
    as if no block shared its holders) the oldest quarter of one dict is dropped per need. What that loses is belief,
    never correctness.
    """

    __slots__ = (
        *("_blocks", "_cap_bytes", "_evictions", "_further", "_holders", "_most_blocks", "_next_to_trim"),
        *("_oldest_alive", "_shard_mask", "_shards"),
    )

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < LEAST_CAP_BYTES:
            raise ValueError(f"a prefix index needs at least {LEAST_CAP_BYTES} bytes, not {cap_bytes}")
        self._cap_bytes = cap_bytes
        self._most_blocks = cap_bytes // BLOCK_COST_BYTES
        shards = _MOST_SHARDS
        while shards > 1 and self._most_blocks < 64 * shards:
            shards //= 2
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self._shard_mask = shards - 1
        self._next_to_trim = 0
        self._holders: list[_Holder] = []
        self._oldest_alive: list[int] = []
        self._blocks = 0
        self._further = 0  # holders beyond the eighth, of all blocks together
        self._evictions = 0

    # -- reading

    def match(self, fingerprint: Fingerprint, prompt_tokens: int) -> list[int]:
        """How many of the prompt's tokens each slot is believed to hold, index = slot.

        Bytes are scaled to tokens by `prompt_tokens / fingerprint.n_bytes`. Slots never seen are beyond the list's end.
        """
        reach = [0] * len(self._holders)
        known = self._known(fingerprint.rungs)
        if not known:
            return reach
        self._measure(fingerprint.rungs, known - 1, reach)
        scale = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
        return [int(blocks * scale) for blocks in reach]

    def held_tokens(self, slot: int) -> float:
        """How many tokens the endpoint in this slot is believed to hold, of all prompts together."""
        return self._holders[slot].held if slot < len(self._holders) else 0.0

    def regret(self, slot: int) -> float:
        """Share, 0 to 1, of what aged out of this slot that was asked for again when nobody held it any more.

        A ghost list for free: an entry whose holders are all dead stays in the table until its key is met again or the
        cap drops it. Counted by tokens, fading over as many evictions as the slot has room for.
        """
        return self._holders[slot].regret() if slot < len(self._holders) else 0.0

    def _measure(self, keys: Keys, last: int, reach: list[int]) -> None:
        """Writes into `reach` how many blocks each slot holds: halves only where holders change between two rungs."""
        first_holders, last_holders = self._at(keys[0]), self._at(keys[last])
        alive = {first_holders: self._alive(first_holders), last_holders: self._alive(last_holders)}
        for slot in alive[last_holders]:
            reach[slot] = LENGTHS[last]
        pending = [(0, first_holders, last, last_holders)]
        while pending:
            low, at_low, high, at_high = pending.pop()
            if at_low == at_high or len(alive[at_low]) == len(alive[at_high]):
                continue
            if high - low > 1:
                middle = (low + high) // 2
                at_middle = self._at(keys[middle])
                if at_middle not in alive:
                    alive[at_middle] = self._alive(at_middle)
                pending += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
                continue
            length = LENGTHS[low]
            for slot in alive[at_low]:
                if reach[slot] < length:
                    reach[slot] = length

    def _at(self, key: int) -> int:
        return self._shards[key & self._shard_mask].get(key, 0)

    def _alive(self, holders: int) -> list[int]:
        oldest = self._oldest_alive
        if holders <= _LANE:
            slot = holders & _SLOT
            return [slot] if holders >= oldest[slot] else []
        return [stamp & _SLOT for stamp in _stamps(holders) if stamp >= oldest[stamp & _SLOT]]

    def _known(self, keys: Keys) -> int:
        """The first rung without an entry, by halving; all if all are known, which is asked first."""
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
        """The slot was given this prompt and will hold all of it. Costs only what is new or was not touched lately."""
        if fingerprint.rungs:
            tokens_per_block = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
            self.insert_rungs(fingerprint.rungs, slot, tokens_per_block)

    def insert_rungs(self, keys: Keys, slot: int, tokens_per_block: float) -> None:
        """As `insert`, by the keys that have entries alone (rungs.py), of which there is at least one."""
        holder = self._holder(slot)
        if len(keys) > self._most_blocks:
            keys = keys[: self._most_blocks]
        self._make_room(len(keys))  # as if all were unknown: some may be room made among the known
        fresh, runs = self._stamp(keys, holder.stamp)
        if runs:
            self._book(fresh, runs, holder, tokens_per_block)
            self._oldest_alive[slot] = holder.oldest_alive()

    def _stamp(self, keys: Keys, stamp: int) -> tuple[int, list[_Run]]:
        """Stamps blocks anew and moves them to the young end of their dict, deepest first, until one bears the stamp
        already: so do all before it. How many those are, and the runs of blocks whose holders were the same."""
        shards, mask = self._shards, self._shard_mask
        runs: list[_Run] = []
        run = renewed = -1
        for end in range(len(keys), 0, -1):
            key = keys[end - 1]
            shard = shards[key & mask]
            holders = shard.pop(key, 0)
            if holders != run:
                if holders == stamp or (holders > _LANE and stamp in _stamps(holders)):
                    shard[key] = holders
                    return end, runs
                run = holders
                renewed, previous = self._without(holders, stamp & _SLOT)
                runs.append((end, holders, renewed, previous))
                renewed = renewed << _LANE_BITS | stamp
            shard[key] = renewed
        return 0, runs

    def _book(self, fresh: int, runs: list[_Run], holder: _Holder, tokens_per_block: float) -> None:
        """All these runs are young in the holder's book and no longer old; who has evicted them regrets it."""
        lengths, oldest = LENGTHS, self._oldest_alive[holder.stamp & _SLOT]
        low, done = fresh, lengths[fresh - 1] if fresh else 0
        holder.gain((lengths[runs[0][0] - 1] - done) * tokens_per_block)
        for end, holders, others, previous in reversed(runs):
            if holders:
                tokens = (lengths[end - 1] - done) * tokens_per_block
                holder.lose(previous, tokens)
                if not others and previous < oldest:
                    self._regret(holders, tokens)
                if holders > _ROOM_FOR_ONE:
                    self._further += (end - low) * (_beyond(others << _LANE_BITS) - _beyond(holders))
            else:
                self._blocks += end - low
            low, done = end, lengths[end - 1]

    def _regret(self, holders: int, tokens: float) -> None:
        """Blocks that all these slots have evicted are computed once more: each is missed where it was."""
        for stamp in _stamps(holders):
            holder = self._holders[stamp & _SLOT]
            if stamp >= holder.reborn:
                holder.missed += tokens

    def _without(self, holders: int, slot: int) -> tuple[int, int]:
        """The live holders other than `slot`, and the stamp that slot had (0: none)."""
        others = previous = 0
        for stamp in _stamps(holders):
            if stamp & _SLOT == slot:
                previous = stamp
            elif stamp >= self._oldest_alive[stamp & _SLOT]:
                others = others << _LANE_BITS | stamp
        return others, previous

    def _stride(self, rung: int) -> int:
        return LENGTHS[rung] - (LENGTHS[rung - 1] if rung else 0)

    def trim(self, fingerprint: Fingerprint, slot: int, kept_tokens: int, prompt_tokens: int) -> None:
        """The slot holds at most `kept_tokens` of this prompt: for one that died before its first token."""
        if fingerprint.rungs:
            tokens_per_block = prompt_tokens * fingerprint.block_bytes / fingerprint.n_bytes
            self.trim_rungs(fingerprint.rungs, slot, kept_tokens, tokens_per_block)

    def trim_rungs(self, keys: Keys, slot: int, kept_tokens: int, tokens_per_block: float) -> None:
        """As `trim`, by the keys that have entries alone."""
        if slot >= len(self._holders):
            return
        first = bisect_right(LENGTHS, kept_tokens / tokens_per_block if tokens_per_block else 0)
        for rung, key in enumerate(keys[first:], first):
            shard = self._shards[key & self._shard_mask]
            if key in shard:
                holders = shard[key]
                others, previous = self._without(holders, slot)
                self._holders[slot].lose(previous, self._stride(rung) * tokens_per_block)
                self._further += _beyond(others) - _beyond(holders)
                if others:
                    shard[key] = others
                else:
                    del shard[key]
                    self._blocks -= 1

    def confirm(self, slot: int, believed_share: float, cached_share: float) -> None:
        """An answer told what was really cached; shares of the prompt, 0 to 1, as believed at the pick and as reported.

        An engine's LRU gives up its oldest first, so finding less than believed says that the cache is smaller than we
        count on (running requests live in the same memory): the slot's believed capacity shrinks by 5 %, and regrows by
        2 % with every belief that held. A slot without a known capacity gets what it holds now as a first estimate.
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
        """How many tokens of KV the endpoint in this slot has room for; beliefs beyond it age out, oldest first.

        None: nobody knows, as of an endpoint not heard yet.
        """
        holder = self._holder(slot)
        holder.capacity_tokens = None if tokens is None else float(tokens)
        self._oldest_alive[slot] = holder.oldest_alive()

    def forget(self, slot: int) -> None:
        """Nothing is believed of the slot any more (restarted, removed, given to another endpoint). O(1).

        Its capacity stays until `set_capacity` says otherwise; mistrust of it is forgotten too.
        """
        if slot < len(self._holders):
            self._holders[slot].empty()
            self._oldest_alive[slot] = self._holders[slot].stamp

    # -- memory

    def stats(self) -> IndexStats:
        """Counts and measured memory; walks the dicts' headers (some 30 us), so for scrapes, not for requests."""
        key_bytes = sys.getsizeof(_LANE) + 12
        used = sum(map(sys.getsizeof, self._shards)) + self._blocks * key_bytes + self._further * HOLDER_COST_BYTES
        return IndexStats(used, self._blocks, self._evictions, tuple(int(holder.held) for holder in self._holders))

    def _holder(self, slot: int) -> _Holder:
        if not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"slot {slot} is not in 0..{MAX_SLOTS - 1}")
        while slot >= len(self._holders):
            self._holders.append(_Holder(len(self._holders)))
            self._oldest_alive.append(self._holders[-1].stamp)
        return self._holders[slot]

    def _make_room(self, blocks: int) -> None:
        while (self._blocks + blocks) * BLOCK_COST_BYTES + self._further * HOLDER_COST_BYTES > self._cap_bytes:
            shard = self._shards[self._next_to_trim]
            dropped = (len(shard) + 3) // 4
            if self._further and max(islice(shard.values(), dropped), default=0) > _MOST_IN_COST:
                self._further -= sum(map(_beyond, islice(shard.values(), dropped)))
            self._shards[self._next_to_trim] = dict(islice(shard.items(), dropped, None))
            self._next_to_trim = (self._next_to_trim + 1) & self._shard_mask
            self._blocks -= dropped
            self._evictions += dropped


def _beyond(holders: int) -> int:
    """How many holders beyond the eighth are packed into the number."""
    if holders <= _MOST_IN_COST:
        return 0
    return (holders.bit_length() + _LANE_BITS - 1) // _LANE_BITS - _HOLDERS_IN_COST


def _stamps(holders: int) -> list[int]:
    """The stamps packed into a holders number, at most one per slot."""
    if holders <= _LANE:
        return [holders] if holders else []
    lanes = (holders.bit_length() + _LANE_BITS - 1) // _LANE_BITS
    return memoryview(holders.to_bytes(lanes * 8, sys.byteorder)).cast("Q").tolist()
