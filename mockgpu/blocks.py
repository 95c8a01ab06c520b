"""Paged KV of one TP group: fixed blocks, reference counts, a prefix cache, and LRU eviction.

A block is in use (references > 0) or free. A free block keeps its key, and thus its content, until
it is allocated again. Not here: who gets blocks (scheduler.py), or tokens (text.py); a block is
identified by its chained key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class BlockPool:
    """All KV blocks of a group. Sole owner of their reference counts and of the prefix cache."""

    def __init__(self, total: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if total < 1:
            raise ValueError(f"a TP group needs at least one KV block, got {total}")
        self.total = total
        self.block_tokens = block_tokens
        self._references = [0] * total
        self._keys: list[int | None] = [None] * total
        self._by_key: dict[int, int] = {}
        # Free blocks in order of eviction: blocks without a key first, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._taken: list[int] | None = None
        # Called when a key leaves the prefix cache, and when all of them do.
        self.on_evicted: Callable[[int], None] | None = None
        self.on_cleared: Callable[[], None] | None = None

    def record_allocations(self) -> None:
        """Start recording which blocks are allocated, for `pop_allocated()`."""
        self._taken = []

    def pop_allocated(self) -> list[int]:
        """Return the blocks that were allocated since the last call."""
        taken, self._taken = self._taken or [], []
        return taken

    @property
    def free(self) -> int:
        """The number of unreferenced blocks.

        Cached content counts as free, because it can be evicted.
        """
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.total

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` keys are cached, from the start without a gap."""
        by_key = self._by_key
        for i in range(min(limit, len(keys))):
            if keys[i] not in by_key:
                return i
        return min(limit, len(keys))

    def count_free_hits(self, keys: Sequence[int], hits: int) -> int:
        """Return how many of the first `hits` cached blocks are free. Using them shrinks `free`."""
        return sum(self._references[self._by_key[keys[i]]] == 0 for i in range(hits))

    def acquire_cached(self, keys: Sequence[int], hits: int) -> list[int]:
        """Reference the first `hits` cached blocks and return them. They must be cached."""
        blocks = [self._by_key[keys[i]] for i in range(hits)]
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return blocks

    def allocate(self) -> int:
        """Allocate a block, evicting the oldest cached content.

        Raises IndexError if none is free.
        """
        if not self._free:
            raise IndexError("no free KV block")
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
            if self.on_evicted is not None:
                self.on_evicted(key)
        self._references[block] = 1
        if self._taken is not None:
            self._taken.append(block)
        return block

    def register(self, block: int, key: int) -> bool:
        """Register a full block's content for sharing; return whether it is new in the cache.

        The first block with a content keeps its key.
        """
        if key in self._by_key or self._keys[block] is not None:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        return True

    def cached_keys(self) -> list[int]:
        """Return the keys of all cached blocks."""
        return list(self._by_key)

    def release(self, blocks: Sequence[int]) -> None:
        """Return references, last block first, because a prompt's tail is worth less than its head.

        Raises ValueError for a block that is not in use.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise ValueError(f"KV block {block} released twice")
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache. Blocks in use stay in use."""
        self._by_key.clear()
        self._keys = [None] * self.total
        if self.on_cleared is not None:
            self.on_cleared()

    def check(self) -> None:
        """Assert the invariants: free means unreferenced, and keys and blocks match. For tests."""
        assert all(
            (count == 0) == (block in self._free) for block, count in enumerate(self._references)
        )
        assert all(self._keys[block] == key for key, block in self._by_key.items())
        assert sum(key is not None for key in self._keys) == len(self._by_key)
