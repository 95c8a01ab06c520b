"""Property test of which free KV block a mock engine uses next, and so evicts from its cache.

The expected order is that of one list of free blocks: blocks without content first, then the
longest unused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mockgpu.paged_kv_cache import BlockPool

TOTAL = 10


class OneList:
    """A simple pool of KV blocks to compare with: all free blocks are in one ordered list."""

    def __init__(self) -> None:
        self.free = OrderedDict.fromkeys(range(TOTAL))
        self.references, self.keys = [0] * TOTAL, dict[int, int]()

    def allocate(self, count: int) -> list[int]:
        blocks = list(self.free)[:count]
        for block in blocks:
            del self.free[block]
            self.keys.pop(block, None)
            self.references[block] = 1
        return blocks

    def acquire(self, keys: Sequence[int]) -> list[int]:
        blocks = [block for key in keys for block, own in self.keys.items() if own == key]
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] += 1
        return blocks

    def register(self, block: int, key: int) -> None:
        if key not in self.keys.values():
            self.keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None
                if block not in self.keys:
                    self.free.move_to_end(block, last=False)


steps = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(0, 9), max_size=6, unique=True)),
    st.tuples(st.just("plain"), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("clear"), st.none()),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_blocks_are_allocated_in_the_order_of_one_list(
    plan: Sequence[tuple[str, object]],
) -> None:
    pool, model, held = BlockPool(TOTAL), OneList(), list[list[int]]()
    for step, value in plan:
        if step == "admit" and isinstance(value, list):
            held.append(_admit(pool, model, value))
        elif step == "plain" and isinstance(value, int):
            count = min(value, pool.free)
            held.append(pool.allocate_blocks(count))
            assert held[-1] == model.allocate(count)
        elif step == "end" and isinstance(value, int) and held:
            blocks = held.pop(value % len(held))
            pool.release(blocks)
            model.release(blocks)
        elif step == "clear":
            pool.clear_prefix_cache()
            model.keys.clear()
        assert pool.free == len(model.free)
        pool.check()


def _admit(pool: BlockPool, model: OneList, keys: Sequence[int]) -> list[int]:
    hits = pool.count_hits(keys, len(keys))
    blocks = pool.acquire_cached(keys, hits)
    assert blocks == model.acquire(keys[:hits])
    rest = keys[hits : hits + pool.free]
    new = pool.allocate_blocks(len(rest))
    assert new == model.allocate(len(rest))
    pool.register_blocks(new, rest)
    for block, key in zip(new, rest, strict=True):
        model.register(block, key)
    return blocks + new


def test_content_that_is_used_again_and_again_takes_no_more_memory() -> None:
    pool = BlockPool(TOTAL)
    blocks = pool.allocate_blocks(2)
    pool.register_blocks(blocks, [1, 2])
    pool.release(blocks)
    for _ in range(100):
        pool.release(pool.acquire_cached([1, 2], 2))
    assert len(pool._cached) <= 2 * TOTAL + 2
    assert pool.allocate_blocks(TOTAL)[-2:] == [1, 0]
