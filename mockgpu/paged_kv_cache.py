"""The paged KV cache of one engine: fixed-size blocks, reference counts, prefix cache, eviction.

- A block with references is in use. A block without references is free, but its content stays
  cached until it is allocated again.
- The free block that was used longest ago is allocated (evicted) first.
- The key of a block is a hash of all tokens up to the block's end.

The scheduler (scheduler.py) decides which sequence gets blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of KV blocks that `tokens` tokens need, rounded up."""
    return -(-tokens // block_tokens)


class BlockPool:
    """All KV blocks of one engine, with their reference counts and the prefix cache.

    total         number of KV blocks
    block_tokens  tokens per block
    free          number of KV blocks that no request uses. Blocks whose content is still cached
                  count as free, because they can be evicted
    """

    # _fresh: free blocks without a key; the last one is allocated first
    # _cached: free blocks with a key, the longest unused first. A block that is used again stays in
    # it until its turn comes, because removing it from the middle would take long
    # _stale: by block, the number of its places in _cached that do not count for that reason
    def __init__(self, total: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if total < 1:
            raise ValueError(f"the KV cache must have at least 1 block, not {total}")
        self.total = self.free = total
        self.block_tokens = block_tokens
        self._references = [0] * total
        self._keys: list[int | None] = [None] * total
        self._by_key: dict[int, int] = {}
        self._fresh = [*reversed(range(total))]
        self._cached: deque[int] = deque()
        self._stale: dict[int, int] = {}
        self._taken: list[int] | None = None
        # Callbacks: one key was evicted from the prefix cache; all keys were removed.
        self.on_evicted: Callable[[int], None] | None = None
        self.on_cleared: Callable[[], None] | None = None

    def record_allocations(self) -> None:
        """Begin to note which KV blocks are allocated; pop_allocated() returns them."""
        self._taken = []

    def pop_allocated(self) -> list[int]:
        """Return which KV blocks were allocated since the last call of this method."""
        taken, self._taken = self._taken or [], []
        return taken

    @property
    def usage(self) -> float:
        """Return the used fraction of the engine's KV blocks, from 0 to 1."""
        return 1 - self.free / self.total

    def count_hits(self, keys: Sequence[int], limit: int) -> int:
        """Return the number of cached blocks of a prompt before the first missing one.

        keys  keys of the prompt's blocks; at most the first `limit` are looked up
        """
        by_key = self._by_key
        for i in range(min(limit, len(keys))):
            if keys[i] not in by_key:
                return i
        return min(limit, len(keys))

    def count_free_hits(self, keys: Sequence[int], hits: int) -> int:
        """Return how many of a prompt's first `hits` blocks, all cached, are used by no request.

        Such blocks count as free. If a request uses them, the number of free blocks falls by the
        result.
        """
        return sum(self._references[self._by_key[keys[i]]] == 0 for i in range(hits))

    def acquire_cached(self, keys: Sequence[int], hits: int) -> list[int]:
        """Use the cached blocks of the first `hits` keys for a request, and return their numbers.

        All of these keys must be cached.
        """
        blocks = [self._by_key[keys[i]] for i in range(hits)]
        for block in blocks:
            if self._references[block] == 0:
                self.free -= 1
                self._stale[block] = self._stale.get(block, 0) + 1
            self._references[block] += 1
        if len(self._cached) > 2 * self.total:  # most of its places are stale
            self._cached = deque(self._in_order())
            self._stale.clear()
        return blocks

    def allocate(self) -> int:
        """Allocate a free KV block and return its number; see `allocate_blocks`."""
        return self.allocate_blocks(1)[0]

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` free KV blocks and return their numbers.

        Their cached contents, if any, are evicted. Raises IndexError, and allocates nothing, if
        fewer blocks are free.
        """
        if count > self.free:
            raise IndexError(
                f"cannot allocate {count} KV blocks: {self.free} are free, all others are in use"
            )
        self.free -= count
        references = self._references
        blocks = self._fresh[: -count - 1 : -1]
        if blocks:
            del self._fresh[-len(blocks) :]
            for block in blocks:
                references[block] = 1
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        if self._taken is not None:
            self._taken += blocks
        return blocks

    def _evict(self, count: int) -> list[int]:
        # Allocate the `count` free blocks whose content was used longest ago, and forget it.
        cached, keys, by_key = self._cached, self._keys, self._by_key
        references, on_evicted = self._references, self.on_evicted
        blocks = [cached.popleft() for _ in range(count)] if not self._stale else self._pop(count)
        for block in blocks:
            references[block] = 1
            key = keys[block]
            assert key is not None
            del by_key[key]
            keys[block] = None
            if on_evicted is not None:
                on_evicted(key)
        return blocks

    def _pop(self, count: int) -> list[int]:
        # Take the first `count` blocks of _cached, and drop the stale places before them.
        cached, stale, blocks = self._cached, self._stale, list[int]()
        while len(blocks) < count:
            block = cached.popleft()
            places = stale.get(block)
            if places is None:
                blocks.append(block)
            elif places > 1:
                stale[block] = places - 1
            else:
                del stale[block]
        return blocks

    def _in_order(self) -> Iterator[int]:
        # Yield the free blocks with a key, the longest unused first, without stale places.
        stale = dict(self._stale)
        for block in self._cached:
            if block not in stale:
                yield block
            elif stale[block] > 1:
                stale[block] -= 1
            else:
                del stale[block]

    def register(self, block: int, key: int) -> bool:
        """Add a full KV block to the prefix cache under `key`, so that later prompts can use it.

        Returns whether it was added. If another block with the same key is cached already, that
        block stays, and the result is False.
        """
        if key in self._by_key or self._keys[block] is not None:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        return True

    def register_blocks(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make full KV blocks available to later prompts; see `register`.

        `keys` has the key of each block, in the same order.
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
        unused, keys = self._without_reference(blocks), self._keys
        self.free += len(unused)
        # Nearly always the last block alone, which is not full, has no key.
        full = 0
        while full < len(unused) and keys[unused[full]] is None:
            full += 1
        self._fresh += unused[:full]
        unused = unused[full:]
        if None in map(keys.__getitem__, unused):
            self._fresh += [block for block in unused if keys[block] is None]
            unused = [block for block in unused if keys[block] is not None]
        self._cached += unused

    def _without_reference(self, blocks: Sequence[int]) -> list[int]:
        # Remove one reference from each block, and return those without any, the last one first.
        references, shared = self._references, len(blocks)
        for block in blocks:
            if references[block] != 1:
                shared = blocks.index(block)
                break
            references[block] = 0
        unused = list[int]()
        for block in reversed(blocks[shared:]):
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"cannot release KV block {block}: no sequence uses it")
            references[block] = count
            if not count:
                unused.append(block)
        unused += reversed(blocks[:shared])
        return unused

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache. Blocks in use keep their references, but lose their keys."""
        self._fresh[:0] = [*reversed([*self._in_order()])]
        self._cached.clear()
        self._stale.clear()
        self._by_key.clear()
        self._keys = [None] * self.total
        if self.on_cleared is not None:
            self.on_cleared()

    def check(self) -> None:
        """Check the consistency of references, keys and blocks with assertions. For tests."""
        cached = [*self._in_order()]
        unused = {block for block, count in enumerate(self._references) if not count}
        assert unused == {*self._fresh, *cached}
        assert len(unused) == len(self._fresh) + len(cached) == self.free
        assert all(self._keys[block] is None for block in self._fresh)
        assert all(self._keys[block] is not None for block in cached)
        assert all(self._keys[block] == key for key, block in self._by_key.items())
        assert sum(key is not None for key in self._keys) == len(self._by_key)
