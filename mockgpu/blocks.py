"""Paged KV of one TP group: fixed blocks, reference counts, a prefix cache by chained keys, LRU eviction.

A block is held (references > 0) or free; a free block keeps its key, and so its content, until it is taken for
something else. Who gets blocks and when is the scheduler's; tokens are text.py's: here a block is known by its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold that many tokens."""
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
        # Free blocks, the least worth keeping first: never-keyed ones, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._taken: list[int] | None = None

    def log_taken(self) -> None:
        """From now on remember which blocks get new owners, for `newly_taken()`."""
        self._taken = []

    def newly_taken(self) -> list[int]:
        """Blocks that `take()` gave out since the last call."""
        taken, self._taken = self._taken or [], []
        return taken

    @property
    def free(self) -> int:
        """Blocks nobody holds; cached content in them counts as free, for it can be evicted."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks held, 0 to 1."""
        return 1 - len(self._free) / self.total

    def hits(self, keys: Sequence[int], limit: int) -> int:
        """How many of the first `limit` keys, from the start without a gap, are cached."""
        by_key = self._by_key
        for i in range(min(limit, len(keys))):
            if keys[i] not in by_key:
                return i
        return min(limit, len(keys))

    def idle_hits(self, keys: Sequence[int], hits: int) -> int:
        """How many of the first `hits` cached blocks nobody holds: taking them shrinks what is free."""
        return sum(self._references[self._by_key[keys[i]]] == 0 for i in range(hits))

    def share(self, keys: Sequence[int], hits: int) -> list[int]:
        """Take a reference on each of the first `hits` cached blocks; they must be cached (`hits()` said so)."""
        blocks = [self._by_key[keys[i]] for i in range(hits)]
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return blocks

    def take(self) -> int:
        """A block of one's own, evicting the oldest cached content. IndexError when none is free."""
        if not self._free:
            raise IndexError("no free KV block")
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
        self._references[block] = 1
        if self._taken is not None:
            self._taken.append(block)
        return block

    def seal(self, block: int, key: int) -> None:
        """Name a full block's content so that others may share it. The first block of a content keeps the name."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back, ends first: a prompt's tail is worth less than its head. ValueError if not held."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise ValueError(f"KV block {block} released twice")
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Drop the prefix cache; held blocks stay with their holders."""
        self._by_key.clear()
        self._keys = [None] * self.total

    def check(self) -> None:
        """Assert the invariants: free = unreferenced, keys and blocks map to each other. For tests."""
        assert all(
            (count == 0) == (block in self._free) for block, count in enumerate(self._references)
        )
        assert all(self._keys[block] == key for key, block in self._by_key.items())
        assert sum(key is not None for key in self._keys) == len(self._by_key)
