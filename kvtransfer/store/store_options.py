"""The options of a store, and the number of blocks that fit into its memory and its disk file."""

from __future__ import annotations

import msgspec

from kvtransfer.store.slot_format import HEADER_BYTES, MAX_SLOTS, PAGE_BYTES, SlotGeometry
from kvtransfer.store.tier_index import INDEX_BYTES


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a store, with its limits.

    slot_bytes    maximum bytes of a block; a smaller block takes as much memory
    memory_bytes  limit of the memory for blocks, and for the index of both tiers
    disk_bytes    limit of the file on disk; 0: blocks are not stored on disk
    directory     directory of that file; "" without a disk
    lease_s       maximum seconds for which a reader may use blocks in memory; afterwards the store
                  may overwrite them
    io_s          seconds without progress after which the store closes a client's connection: a
                  writer that sends nothing, or a client that reads no response
    save_s        seconds between two steps that copy blocks to disk
    save_bytes    bytes that one such step copies, at least one block
    max_clients   maximum number of connections at the same time

    Raises ValueError if not a single block fits, if only one of disk size and directory is given,
    if a time is not positive, or if no client is allowed.
    """

    slot_bytes: int
    memory_bytes: int
    disk_bytes: int = 0
    directory: str = ""
    lease_s: float = 30.0
    io_s: float = 10.0
    save_s: float = 0.1
    save_bytes: int = 64 << 20
    max_clients: int = 256

    def __post_init__(self) -> None:
        if bool(self.disk_bytes) != bool(self.directory):
            raise ValueError(
                "a disk tier needs both a directory and a size; give both of them, or neither"
            )
        if not min(self.lease_s, self.io_s, self.save_s) > 0 or self.max_clients < 1:
            raise ValueError(
                "lease_s, io_s and save_s must be positive, and max_clients at least 1"
            )
        _ = self.memory_geometry

    @property
    def disk_geometry(self) -> SlotGeometry | None:
        """The number and the maximum size of blocks on disk; None if the store has no disk."""
        if not self.disk_bytes:
            return None
        return _fit(self.disk_bytes, self.slot_bytes, 0, "disk")

    @property
    def memory_geometry(self) -> SlotGeometry:
        """The number and the maximum size of blocks in the store's memory.

        Blocks take what `memory_bytes` leaves after the indexes of memory and disk.
        """
        disk = self.disk_geometry
        index_bytes = disk.slots * INDEX_BYTES if disk is not None else 0
        return _fit(self.memory_bytes - index_bytes, self.slot_bytes, INDEX_BYTES, "memory")


def _fit(space: int, slot_bytes: int, index_bytes: int, tier: str) -> SlotGeometry:
    stride = SlotGeometry(1, slot_bytes).stride
    slots = (space - 2 * PAGE_BYTES) // (stride + HEADER_BYTES + index_bytes)
    if slots < 1:
        raise ValueError(
            f"the {tier} of the store has no room for a single block of {slot_bytes} bytes; "
            "give it more, or use smaller blocks"
        )
    return SlotGeometry(min(slots, MAX_SLOTS), slot_bytes)
