"""StoreIndex: decides where a store keeps its blocks, in two tiers: memory and disk.

Each tier consists of slots, which hold one block each. The index decides which blocks are stored,
evicted, saved to disk and loaded back. It also manages leases: a reader's slots are pinned (not
reused) until the reader releases them, its connection ends, or the lease expires.

The owner calls it under a lock, with the time and events, and copies the bytes (block_store.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvtransfer.store.block_keys import Key
from kvtransfer.store.tier_index import TierIndex

IN_MEMORY, ON_DISK = 1, 2
"""Bits of the tiers in which a block is ready."""


class StoreCounters(msgspec.Struct):
    """Counts of events since the store started; of blocks unless stated otherwise.

    stored   blocks that writers have stored
    refused  blocks for which there was no slot, because readers or writers used all of them
    aborted  blocks whose writer ended or failed before the last byte
    hits     blocks that readers got
    saved    blocks that were copied to disk
    loaded   blocks that were copied back to memory
    failed   copies between the tiers that failed because of disk errors
    corrupt  blocks on disk whose bytes no longer match their digest
    evicted  blocks that left memory and are still on disk
    lost     blocks that left memory before they were copied to disk, so that the store has none
    dropped  blocks that were evicted from disk
    expired  leases that reached their time limit
    """

    stored: int = 0
    refused: int = 0
    aborted: int = 0
    hits: int = 0
    saved: int = 0
    loaded: int = 0
    failed: int = 0
    corrupt: int = 0
    evicted: int = 0
    lost: int = 0
    dropped: int = 0
    expired: int = 0


class ReadLease(msgspec.Struct):
    """A reader's right to read some slots in memory, which are not reused while the lease is open.

    The slots hold consecutive blocks of a prompt.
    """

    owner: int
    slots: list[int]
    expires_s: float


class TierCopy(msgspec.Struct, frozen=True):
    """A block that is being copied between memory and disk, with its slots (places) in both."""

    key: Key
    memory_slot: int
    disk_slot: int


class StoreIndex:
    """The slots (places of blocks), leases and pending copies of one store.

    memory_slots  number of slots in memory
    disk_slots    number of slots on disk; 0: no disk tier
    lease_s       seconds after which a reader's lease expires
    """

    def __init__(self, memory_slots: int, disk_slots: int = 0, lease_s: float = 30.0) -> None:
        if memory_slots < 1:
            raise ValueError(
                "the store's memory is too small for one block; give it more memory, or use "
                "smaller blocks"
            )
        self.memory = TierIndex(memory_slots)
        self.disk = TierIndex(disk_slots)
        self.counters = StoreCounters()
        self._lease_s = lease_s
        self._leases: OrderedDict[int, ReadLease] = OrderedDict()  # the first one expires first
        self._last_lease = 0
        # Blocks in memory that are not on disk yet, in order of their commits.
        self._unsaved: OrderedDict[Key, None] = OrderedDict()

    @property
    def unsaved(self) -> int:
        """Return the number of blocks that wait to be copied to disk."""
        return len(self._unsaved)

    @property
    def leases(self) -> int:
        return len(self._leases)

    def places(self, key: Key) -> int:
        """Return the bits IN_MEMORY and ON_DISK for the tiers that have the block; 0 for none."""
        return IN_MEMORY * (key in self.memory) | ON_DISK * (key in self.disk)

    def count_prefix(self, keys: Sequence[Key]) -> int:
        """Return how many of these blocks are stored, up to the first missing one."""
        for count, key in enumerate(keys):
            if key not in self.memory and key not in self.disk:
                return count
        return len(keys)

    def wants(self, key: Key) -> bool:
        """Return whether a writer should send this block.

        That is so if no tier has it, and no other writer is sending it.
        """
        return not self.places(key) and not self.memory.is_writing(key)

    # Writers

    def begin_write(self, key: Key, now: float) -> int | None:
        """Reserve a slot in memory for a block that a writer sends, and return its number.

        Returns None if the block is already stored or being sent, or if no slot can be reused.
        """
        if not self.wants(key):
            return None
        slot = self._take_memory(key, now)
        self.counters.refused += slot is None
        return slot

    def end_write(self, key: Key, *, is_complete: bool) -> None:
        """End a write: make the block readable if it is complete, otherwise free its slot."""
        if is_complete:
            self._commit_memory(key)
            self.counters.stored += 1
        else:
            self.memory.abort(key)
            self.counters.aborted += 1

    # Readers

    def acquire(self, owner: int, keys: Sequence[Key], now: float) -> tuple[int, list[int]]:
        """Pin the longest prefix of these blocks that is in memory, so that its slots are not
        reused.

        Returns the number of the lease, and the slots. The lease ends with the connection `owner`
        at the latest.
        """
        self.expire(now)
        slots: list[int] = []
        for key in keys:
            if key not in self.memory:
                break
            slots.append(self.memory.pin(key))
        self.counters.hits += len(slots)
        self._last_lease += 1
        self._leases[self._last_lease] = ReadLease(owner, slots, now + self._lease_s)
        return self._last_lease, slots

    def use(self, keys: Sequence[Key]) -> None:
        """Mark consecutive blocks of a prompt as used now, for the order of eviction.

        The last blocks are evicted first, because they are useless without the earlier ones.
        """
        self.memory.touch(reversed(keys))
        self.disk.touch(reversed(keys))

    def join(self, owner: int, earlier: int, later: int) -> int:
        """Merge two leases into `later`, which gets the slots of both, and return its number."""
        first, second = self._leases.pop(earlier, None), self._leases[later]
        if first is not None and first.owner == owner == second.owner:
            second.slots = first.slots + second.slots
        return later

    def release(self, owner: int, number: int) -> None:
        """End a lease. Does nothing if it has expired, or belongs to another owner."""
        lease = self._leases.get(number)
        if lease is not None and lease.owner == owner:
            self._end_lease(number)

    def end_owner(self, owner: int) -> None:
        """End all leases on blocks that a client held, because its connection was lost."""
        for number in [n for n, lease in self._leases.items() if lease.owner == owner]:
            self._end_lease(number)

    def expire(self, now: float) -> None:
        """End the leases that have expired.

        A reader that is still reading such a slot detects it by the slot's new generation number.
        """
        while self._leases:
            number, lease = next(iter(self._leases.items()))
            if lease.expires_s > now:
                return
            self._end_lease(number)
            self.counters.expired += 1

    # From memory to disk

    def begin_save(self) -> TierCopy | None:
        """Choose the next block to copy to disk, pin it in memory, and return the copy to make.

        Returns None if all blocks are saved, or if no slot on disk can be reused now.
        """
        while self._unsaved:
            key, _ = self._unsaved.popitem(last=False)
            taken = self.disk.begin(key)
            if taken is not None:
                self.counters.dropped += taken[1] is not None
                return TierCopy(key, self.memory.pin(key), taken[0])
            if key not in self.disk:
                self._unsaved[key] = None
                self._unsaved.move_to_end(key, last=False)
                return None
        return None

    def end_save(self, copy: TierCopy, *, is_complete: bool) -> None:
        """End a copy to disk: make it readable if it `is_complete`, otherwise free its slot.

        The block stays in memory.
        """
        if is_complete:
            self.disk.commit(copy.key)
            self.counters.saved += 1
        else:
            self.disk.abort(copy.key)
            self.counters.failed += 1
        self.memory.unpin(copy.memory_slot)

    # From disk to memory

    def begin_load(self, key: Key, now: float) -> TierCopy | None:
        """Begin to load a block from disk to memory, and return the copy to make.

        The block's slot on disk is pinned, and a slot in memory is reserved. Returns None if the
        block is not on disk, is already in memory, or if no slot in memory can be reused.
        """
        if key not in self.disk:
            return None
        slot = self._take_memory(key, now)
        return None if slot is None else TierCopy(key, slot, self.disk.pin(key))

    def end_load(self, copy: TierCopy, *, is_intact: bool, is_readable: bool = True) -> None:
        """End a load from disk: make the block readable in memory if it was copied correctly.

        is_intact    whether the bytes match their digest; if not, the block on disk is dropped
        is_readable  whether the disk could be read; if not, the block on disk is kept
        """
        if is_intact:
            self._commit_memory(copy.key, is_saved=True)
            self.counters.loaded += 1
        else:
            self.memory.abort(copy.key)
            self.counters.failed += not is_readable
            if is_readable:
                self.counters.corrupt += 1
                self.disk.drop(copy.key)
        self.disk.unpin(copy.disk_slot)

    def _take_memory(self, key: Key, now: float) -> int | None:
        self.expire(now)
        taken = self.memory.begin(key)
        if taken is None:
            return None
        slot, evicted = taken
        if evicted is not None:
            is_lost = evicted not in self.disk
            self.counters.lost += is_lost
            self.counters.evicted += not is_lost
            self._unsaved.pop(evicted, None)
        return slot

    def _commit_memory(self, key: Key, *, is_saved: bool = False) -> None:
        self.memory.commit(key)
        if self.disk.slots and not is_saved:
            self._unsaved[key] = None

    def _end_lease(self, number: int) -> None:
        for slot in reversed(self._leases.pop(number).slots):
            self.memory.unpin(slot)

    def check(self) -> None:
        """Assert that tiers, leases and pending copies agree. Tests use this method."""
        self.memory.check()
        self.disk.check()
        assert all(key in self.memory for key in self._unsaved)
