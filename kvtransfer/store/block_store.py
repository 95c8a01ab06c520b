"""BlockStore: a store of KV blocks within one process. unix_socket_server.py serves other
processes.

A lock protects the index, but not the copying of bytes. Bytes are only copied into places that no
reader can find yet, and out of places that are pinned, which means that they are not reused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvtransfer.store.block_keys import Key
from kvtransfer.store.disk_slots import DiskSlots
from kvtransfer.store.memory_slots import MemorySlots
from kvtransfer.store.slot_format import SlotHeader
from kvtransfer.store.store_index import StoreIndex, TierCopy
from kvtransfer.store.store_options import StoreOptions

log = logging.getLogger("penstock")


class BlockStore:
    """A store of KV blocks in memory and on disk, within one process.

    All methods may be called from any thread. Raises SlotFileError if another store uses the
    directory, and OSError if the disk fails.
    """

    def __init__(self, options: StoreOptions, now: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._now = now
        disk = options.disk_geometry
        self._disk = None if disk is None else DiskSlots(Path(options.directory), disk)
        self.memory = MemorySlots(options.memory_geometry)
        self._index = StoreIndex(
            options.memory_geometry.slots, disk.slots if disk is not None else 0, options.lease_s
        )
        self._lock = threading.Lock()
        # This lock lets one block be loaded at a time, so that no block is loaded twice.
        self._loading = threading.Lock()
        if self._disk is not None:
            for slot, key in self._disk.restored():
                self._index.disk.restore(slot, key)
            self._index.disk.seal_restored()

    # Writers

    def wanted(self, keys: Sequence[Key]) -> list[int]:
        """Return which of these blocks the store lacks, so that a writer sends only those.

        The result has indexes into `keys`.
        """
        with self._lock:
            return [index for index, key in enumerate(keys) if self._index.wants(key)]

    def begin_write(self, key: Key, length: int) -> memoryview | None:
        """Begin to store a block of `length` bytes: return the memory into which to write it.

        Returns None if the store does not accept the block now: it is too long, already stored, or
        there is no room. After memory was returned, call `end_write()`.
        """
        if length > self.options.slot_bytes:
            return None
        with self._lock:
            slot = self._index.begin_write(key, self._now())
            if slot is None:
                return None
            self.memory.void(slot)
        return self.memory.data(slot, length)

    def end_write(self, key: Key, length: int, digest: bytes | None) -> None:
        """End the writing of a block: it can be read now, or is discarded if `digest` is None.

        digest  hash of the block's bytes, by which readers verify them
        """
        with self._lock:
            if digest is not None:
                slot = self._index.memory.slot_in_writing(key)
                self.memory.commit(slot, key, length, digest)
            self._index.end_write(key, is_complete=digest is not None)

    # Readers

    def count_prefix(self, keys: Sequence[Key]) -> int:
        """Return how many blocks of a prompt are stored, up to the first missing one."""
        with self._lock:
            return self._index.count_prefix(keys)

    def places(self, keys: Sequence[Key]) -> bytes:
        """Return for each block where it is stored: a byte with bits IN_MEMORY and ON_DISK."""
        with self._lock:
            return bytes(map(self._index.places, keys))

    def acquire(self, owner: int, keys: Sequence[Key]) -> tuple[int, list[int]]:
        """Let a client read as many blocks from the beginning of a prompt as are stored without a
        gap.

        The client gets a lease: until it ends, these blocks are not overwritten. Blocks that are
        only on disk are loaded into memory first, as long as there is room. Returns the number of
        the lease, and the places (slots) of the blocks in memory.

        owner  the client's connection; the lease ends with it at the latest
        keys   keys of consecutive blocks of a prompt
        """
        # A lease for the part in memory keeps it there while the rest is loaded.
        number, slots = self._acquire(owner, keys)
        while len(slots) < len(keys) and self._load(keys[len(slots)]):
            more, further = self._acquire(owner, keys[len(slots) :])
            with self._lock:
                number = self._index.join(owner, number, more)
            if not further:
                break
            slots += further
        return number, slots

    def _acquire(self, owner: int, keys: Sequence[Key]) -> tuple[int, list[int]]:
        with self._lock:
            return self._index.acquire(owner, keys, self._now())

    def use(self, keys: Sequence[Key]) -> None:
        """Record that these blocks were used now, so that others are evicted earlier."""
        with self._lock:
            self._index.use(keys)

    def release(self, owner: int, number: int) -> None:
        with self._lock:
            self._index.release(owner, number)

    def end_owner(self, owner: int) -> None:
        """End all leases of a client that has disconnected, so that its blocks can be evicted."""
        with self._lock:
            self._index.end_owner(owner)

    def _load(self, key: Key) -> bool:
        # Copy a block from disk to memory; return whether it is in memory now.
        if self._disk is None:
            return False
        with self._loading:
            with self._lock:
                if key in self._index.memory:
                    return True
                copy = self._index.begin_load(key, self._now())
                if copy is None:
                    return False
                self.memory.void(copy.memory_slot)
            header, is_readable = self._copy_to_memory(self._disk, copy)
            with self._lock:
                if header is not None:
                    length, digest = header.length, header.digest
                    self.memory.commit(copy.memory_slot, copy.key, length, digest)
                self._index.end_load(copy, is_intact=header is not None, is_readable=is_readable)
        return header is not None

    def _copy_to_memory(self, disk: DiskSlots, copy: TierCopy) -> tuple[SlotHeader | None, bool]:
        # Return the header of the block that was copied, None if it is damaged or cannot be read;
        # and whether the disk could be read.
        try:
            header = disk.header(copy.disk_slot)
            if header is None or header.length > self.options.slot_bytes:
                return None, True
            data = self.memory.data(copy.memory_slot, header.length)
            outcome = disk.read(copy.disk_slot, copy.key, [data])
        except OSError as error:
            log.warning("a block cannot be read from disk: %s", error)
            return None, False
        return (header if outcome.is_intact else None), True

    # From memory to disk

    def save_step(self) -> int:
        """Copy some new blocks from memory to disk, and return how many bytes.

        At most `save_bytes` bytes are copied per call, an option of the store.
        """
        if self._disk is None:
            return 0
        saved = 0
        # In reverse, so that the first blocks of a prompt are the last ones to be evicted.
        for copy in reversed(self._begin_saves()):
            is_saved = self._copy_to_disk(self._disk, copy)
            with self._lock:
                self._index.end_save(copy, is_complete=is_saved)
            saved += is_saved
        return saved

    def _begin_saves(self) -> list[TierCopy]:
        most = max(1, self.options.save_bytes // self.options.slot_bytes)
        copies: list[TierCopy] = []
        with self._lock:
            self._index.expire(self._now())
            while len(copies) < most and (copy := self._index.begin_save()) is not None:
                copies.append(copy)
        return copies

    def _copy_to_disk(self, disk: DiskSlots, copy: TierCopy) -> bool:
        # Return whether the block was copied.
        header = self.memory.header(copy.memory_slot)
        assert header is not None
        assert header.key == copy.key
        try:
            disk.void(copy.disk_slot)
            disk.write(copy.disk_slot, self.memory.data(copy.memory_slot, header.length))
            disk.commit(copy.disk_slot, copy.key, header.length, header.digest)
        except OSError as error:
            log.warning("a block cannot be saved on disk: %s", error)
            return False
        return True

    def stats(self) -> dict[str, int]:
        """Return the store's counters by name, with blocks per tier, unsaved blocks, and leases."""
        with self._lock:
            index = self._index
            counters: dict[str, int] = msgspec.structs.asdict(index.counters)
            return counters | {
                "memory_blocks": len(index.memory),
                "memory_slots": index.memory.slots,
                "disk_blocks": len(index.disk),
                "disk_slots": index.disk.slots,
                "unsaved": index.unsaved,
                "leases": index.leases,
            }

    def close(self) -> None:
        """Save to disk what is in memory, and close both tiers. No other call may be in
        progress.
        """
        while self.save_step():
            pass
        self.memory.close()
        if self._disk is not None:
            self._disk.close()
