"""StoreIndex: the records of a KV store: which blocks it has, where, and which are being read.

Blocks are in memory, on disk, or both. Each of these tiers consists of slots, which hold one block
each. The index decides which blocks are stored, evicted, saved to disk and loaded back. It also
manages leases: while a client reads slots, they are pinned (not reused). A lease ends when the
client releases it, its connection ends, or its time is over.

block_store.py calls the index under a lock, with the time and events, and copies the bytes.
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
    """How often something happened in a KV store since its start; blocks are counted unless stated.

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
    """A client's right to read some blocks in memory; their places are not reused until it ends.

    They are consecutive blocks of a prompt.
    """

    owner: int
    slots: list[int]
    expires_s: float


class TierCopy(msgspec.Struct, frozen=True):
    """A copy of a block from memory to disk or back, which is in progress.

    It has the block's places (slots) in both.
    """

    key: Key
    memory_slot: int
    disk_slot: int


class StoreIndex:
    """The records of one KV store: places of blocks (slots), leases of readers, and pending copies.

    memory_slots  number of slots in memory
    disk_slots    number of slots on disk; 0: no disk tier
    lease_s       seconds after which a reader's lease (its right to read blocks) expires
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
        """Return how many blocks of a prompt are stored, up to the first missing one."""
        for count, key in enumerate(keys):
            if key not in self.memory and key not in self.disk:
                return count
        return len(keys)

    def wants(self, key: Key) -> bool:
        """Return whether a client that has this block should send it to the store.

        False if a tier already has the block, or another client is sending it.
        """
        return not self.places(key) and not self.memory.is_writing(key)

    # Writers

    def begin_write(self, key: Key, now: float) -> int | None:
        """Reserve a slot in memory for a block that a writer sends, and return the slot's number.

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
        """Give a client a lease on a prompt's first blocks, up to the first that is not in memory.

        Until the lease ends, the blocks' places (slots) are not reused. The lease ends with the
        client's connection `owner` at the latest. Returns the lease's number and the slots.
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
        """Merge two leases (rights to read blocks) of a client, and return the number `later`.

        The lease `later` then has the slots of both.
        """
        first, second = self._leases.pop(earlier, None), self._leases[later]
        if first is not None and first.owner == owner == second.owner:
            second.slots = first.slots + second.slots
        return later

    def release(self, owner: int, number: int) -> None:
        """End a lease, because the client has read the blocks.

        Does nothing if the lease has expired, or belongs to another owner.
        """
        lease = self._leases.get(number)
        if lease is not None and lease.owner == owner:
            self._end_lease(number)

    def end_owner(self, owner: int) -> None:
        """End all leases (rights to read blocks) of a client, because its connection was lost."""
        for number in [n for n, lease in self._leases.items() if lease.owner == owner]:
            self._end_lease(number)

    def expire(self, now: float) -> None:
        """End the leases (rights to read blocks) whose time is over at `now`.

        A client that is still reading a block detects it by the slot's new generation number.
        """
        while self._leases:
            number, lease = next(iter(self._leases.items()))
            if lease.expires_s > now:
                return
            self._end_lease(number)
            self.counters.expired += 1

    # From memory to disk

    def begin_save(self) -> TierCopy | None:
        """Choose a block to copy from memory to disk, and return the copy that the caller must
        make.

        Until end_save(), the block stays in memory. Returns None if all blocks are saved, or if no
        slot on disk can be reused now.
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
        """Record that a copy to disk has ended: the block can be read there if it `is_complete`.

        Otherwise its slot on disk is free again. The block stays in memory.
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
        """Begin to copy a block from disk back to memory, and return the copy that the caller must
        make.

        The block's slot on disk is pinned (not reused), and a slot in memory is reserved. Returns
        None if the block is not on disk, is already in memory, or if no slot in memory can be
        reused.
        """
        if key not in self.disk:
            return None
        slot = self._take_memory(key, now)
        return None if slot is None else TierCopy(key, slot, self.disk.pin(key))

    def end_load(self, copy: TierCopy, *, is_intact: bool, is_readable: bool = True) -> None:
        """Record that a copy from disk to memory has ended: the block can be read if it is intact.

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
        """Assert that the records of the store agree with each other. Tests use this method."""
        self.memory.check()
        self.disk.check()
        assert all(key in self.memory for key in self._unsaved)
