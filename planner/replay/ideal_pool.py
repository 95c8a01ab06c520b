"""A KV cache in which an engine finds whatever any engine of its fleet has computed."""

from __future__ import annotations

from collections.abc import Sequence

from mockgpu.paged_kv_cache import BlockPool


class IdealPool(BlockPool):
    """The KV blocks of an engine whose prefix cache contains what all engines have ever computed.

    A block that only other engines have computed appears when it is needed, in no time. It takes
    memory like any block that a request uses. So a replay with such caches bounds the prefill that
    transfers of KV and stores could save.

    everywhere  keys of all blocks that were computed, which all pools of a fleet share
    """

    def __init__(self, total: int, block_tokens: int, everywhere: set[int]) -> None:
        super().__init__(total, block_tokens)
        self._everywhere = everywhere

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks any engine has computed."""
        everywhere, most = self._everywhere, min(limit, len(keys))
        return next((index for index in range(most) if keys[index] not in everywhere), most)

    def count_free_hits(self, keys: Sequence[int], hits: int) -> int:
        """Return how many free blocks the first `hits` blocks take, present or not."""
        present = [key for key in keys[:hits] if key in self._by_key]
        return hits - len(present) + super().count_free_hits(present, len(present))

    def acquire_cached(self, keys: Sequence[int], hits: int) -> list[int]:
        """Use the first `hits` blocks for one more request; those that are missing appear."""
        present = [key for key in keys[:hits] if key in self._by_key]
        blocks = dict(zip(present, super().acquire_cached(present, len(present)), strict=True))
        missing = [key for key in keys[:hits] if key not in blocks]
        if missing:
            appeared = self.allocate_blocks(len(missing))
            super().register_blocks(appeared, missing)
            blocks.update(zip(missing, appeared, strict=True))
        return [blocks[key] for key in keys[:hits]]

    def register(self, block: int, key: int) -> bool:
        self._everywhere.add(key)
        return super().register(block, key)

    def register_blocks(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        self._everywhere.update(keys)
        super().register_blocks(blocks, keys)
