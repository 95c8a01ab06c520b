"""The paged KV cache of one engine: fixed-size blocks, reference counts, prefix cache, eviction.

- A block with references is in use. A block without references is free, but its content stays
  cached until it is allocated again.
- The free block that was used longest ago is allocated (evicted) first.
- The key of a block is a hash of all tokens up to the block's end.

The scheduler (scheduler.py) decides which sequence gets blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

BLOCK_TOKENS = 16


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of KV blocks that `tokens` tokens need, rounded up."""
    return -(-tokens // block_tokens)


class BlockPool:
    """All KV blocks of one engine, with their reference counts and the prefix cache."""

    def __init__(self, total: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if total < 1:
            raise ValueError(f"the KV cache must have at least 1 block, not {total}")
        self.total = total
        self.block_tokens = block_tokens
        self._references = [0] * total
        self._keys: list[int | None] = [None] * total
        self._by_key: dict[int, int] = {}
        # Free blocks in order of eviction: blocks without a key first, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._taken: list[int] | None = None
        # Callbacks: one key was evicted from the prefix cache; all keys were removed.
        self.on_evicted: Callable[[int], None] | None = None
        self.on_cleared: Callable[[], None] | None = None

    def record_allocations(self) -> None:
        """Start to record the allocated KV blocks, which `pop_allocated()` returns."""
        self._taken = []

    def pop_allocated(self) -> list[int]:
        """Return the KV blocks allocated since the last call, and clear the record."""
        taken, self._taken = self._taken or [], []
        return taken

    @property
    def free(self) -> int:
        """Return the number of KV blocks that no request uses.

        Blocks whose content is still cached count as free, because they can be evicted.
        """
        return len(self._free)

    @property
    def usage(self) -> float:
        """Return the used fraction of the engine's KV blocks, from 0 to 1."""
        return 1 - len(self._free) / self.total

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return how many leading keys are cached: the search ends at the first missing key.

        At most the first `limit` keys are looked up.
        """
        by_key = self._by_key
        for i in range(min(limit, len(keys))):
            if keys[i] not in by_key:
                return i
        return min(limit, len(keys))

    def count_free_hits(self, keys: Sequence[int], hits: int) -> int:
        """Return how many of the first `hits` cached blocks are free, that is, used by no request.

        If a request uses them, the number of free blocks falls by the result.
        """
        return sum(self._references[self._by_key[keys[i]]] == 0 for i in range(hits))

    def acquire_cached(self, keys: Sequence[int], hits: int) -> list[int]:
        """Add a reference to the cached KV blocks of the first `hits` keys, and return the blocks.

        All of these keys must be cached.
        """
        blocks = [self._by_key[keys[i]] for i in range(hits)]
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return blocks

    def allocate(self) -> int:
        """Allocate a free KV block and return its number; see `allocate_blocks`."""
        return self.allocate_blocks(1)[0]

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` free KV blocks and return their numbers.

        Their cached contents, if any, are evicted. Raises IndexError, and allocates nothing, if
        fewer blocks are free.
        """
        free, keys, references = self._free, self._keys, self._references
        if count > len(free):
            raise IndexError(
                f"cannot allocate {count} KV blocks: {len(free)} are free, all others are in use"
            )
        blocks, by_key = list(islice(free, count)), self._by_key
        for block in blocks:
            del free[block]
            references[block] = 1
            key = keys[block]
            if key is not None:  # evicted
                del by_key[key]
                keys[block] = None
                if self.on_evicted is not None:
                    self.on_evicted(key)
        if self._taken is not None:
            self._taken += blocks
        return blocks

    def register(self, block: int, key: int) -> bool:
        """Add a full KV block to the prefix cache, and return whether it was added.

        If another block with the same key is cached already, that block stays, and the result is
        False.
        """
        if key in self._by_key or self._keys[block] is not None:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        return True

    def register_blocks(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Add full KV blocks to the prefix cache, each with the key at the same position.

        Blocks whose key is cached already are left out, as in `register`.
        """
        by_key, keys_of_blocks = self._by_key, self._keys
        for block, key in zip(blocks, keys, strict=True):
            if keys_of_blocks[block] is None and by_key.setdefault(key, block) == block:
                keys_of_blocks[block] = key

    def cached_keys(self) -> list[int]:
        return list(self._by_key)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each KV block, from the last block to the first.

        In this order, the end of a prompt is evicted before its beginning, which more prompts
        share. Raises ValueError if a block has no references.
        """
        references, keys, free = self._references, self._keys, self._free
        for block in reversed(blocks):
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"cannot release KV block {block}: no sequence uses it")
            references[block] = count
            if not count:
                free[block] = None
                if keys[block] is None:
                    free.move_to_end(block, last=False)

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache. Blocks in use keep their references, but lose their keys."""
        self._by_key.clear()
        self._keys = [None] * self.total
        if self.on_cleared is not None:
            self.on_cleared()

    def check(self) -> None:
        """Check the consistency of references, keys and blocks with assertions. For tests."""
        assert all(
            (count == 0) == (block in self._free) for block, count in enumerate(self._references)
        )
        assert all(self._keys[block] == key for key, block in self._by_key.items())
        assert sum(key is not None for key in self._keys) == len(self._by_key)
