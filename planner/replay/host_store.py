"""The KV blocks that one host of a replay stores outside its GPUs: in memory, then on disk."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.store.store_index import IN_MEMORY, ON_DISK


class HostStore:
    """A store of KV blocks by their content, as kvtransfer/store keeps them for a host's engines.

    memory_blocks  number of blocks that fit into the host's memory
    disk_blocks    number of blocks that fit on its disk

    A block is written to disk too. The longest unused block is evicted first, and of a prompt its
    last block.
    """

    __slots__ = ("_disk", "_memory", "disk_blocks", "memory_blocks")

    def __init__(self, memory_blocks: int, disk_blocks: int = 0) -> None:
        self.memory_blocks, self.disk_blocks = memory_blocks, disk_blocks
        self._memory: dict[int, None] = {}  # the longest unused first
        self._disk: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._memory.keys() | self._disk.keys())

    def places(self, keys: Sequence[int]) -> bytes:
        """Return one byte per leading block that is stored, with the bits of the tiers that have
        it.
        """
        places = bytearray()
        for key in keys:
            bits = IN_MEMORY * (key in self._memory) | ON_DISK * (key in self._disk)
            if not bits:
                break
            places.append(bits)
        return bytes(places)

    def put(self, keys: Sequence[int]) -> None:
        """Store the blocks of a prompt, or mark those as used that are stored already."""
        _refresh(self._memory, keys, self.memory_blocks)
        _refresh(self._disk, keys, self.disk_blocks)


def _refresh(tier: dict[int, None], keys: Sequence[int], most: int) -> None:
    for key in reversed(keys):
        tier.pop(key, None)
        tier[key] = None
    while len(tier) > most:
        del tier[next(iter(tier))]
