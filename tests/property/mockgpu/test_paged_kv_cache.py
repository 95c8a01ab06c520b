"""Property tests of a mock engine's pool of KV blocks: none is lost, and none is freed twice.

Two prompts share a cached block only if their keys are equal.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mockgpu.paged_kv_cache import BlockPool, blocks_for

TOTAL = 12


class Pool(RuleBasedStateMachine):
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.held: dict[int, list[int]] = {}
        self.next = 0

    @rule(target=holders, chain=st.lists(st.integers(0, 3), max_size=6))
    def admit(self, chain: list[int]) -> int:
        # Acquire the cached part of a chain of keys, and allocate the rest while blocks are free.
        #
        # Returns the number under which the blocks are held.
        keys = [hash(tuple(chain[: i + 1])) for i in range(len(chain))]
        hits = self.pool.count_hits(keys, len(keys))
        idle = self.pool.count_free_hits(keys, hits)
        before = self.pool.free
        blocks = self.pool.acquire_cached(keys, hits)
        assert self.pool.free == before - idle
        while len(blocks) < len(keys) and self.pool.free:
            blocks.append(self.pool.allocate())
            self.pool.register(blocks[-1], keys[len(blocks) - 1])
        assert self.pool.count_hits(keys, len(blocks)) == len(blocks)
        self.next += 1
        self.held[self.next] = blocks
        return self.next

    @rule(target=holders, keys=st.lists(st.integers(0, 6), max_size=6))
    def admit_at_once(self, keys: list[int]) -> int:
        # Do the same as admit() with one call for all blocks, without keys that are cached or occur
        # twice.
        before, cached = self.pool.free, set(self.pool.cached_keys())
        wanted = keys[: self.pool.free]
        blocks = self.pool.allocate_blocks(len(wanted))
        assert self.pool.free == before - len(wanted)
        assert len(set(blocks)) == len(wanted)
        evicted = cached - set(self.pool.cached_keys())
        self.pool.register_blocks(blocks, wanted)
        assert set(self.pool.cached_keys()) == cached - evicted | set(wanted)
        self.next += 1
        self.held[self.next] = blocks
        return self.next

    @rule(holder=consumes(holders))
    def release(self, holder: int) -> None:
        self.pool.release(self.held.pop(holder))

    @rule()
    def forget(self) -> None:
        self.pool.clear_prefix_cache()

    @invariant()
    def blocks_are_conserved(self) -> None:
        distinct = {block for blocks in self.held.values() for block in blocks}
        assert self.pool.free + len(distinct) == TOTAL
        assert self.pool.usage == pytest.approx(len(distinct) / TOTAL)
        self.pool.check()


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_covers_the_tokens_and_wastes_less_than_one(tokens: int, size: int) -> None:
    blocks = blocks_for(tokens, size)
    assert blocks * size >= tokens
    assert (blocks - 1) * size < tokens or blocks == 0


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="no sequence uses it"):
        pool.release([block])


def test_taking_from_a_full_pool_is_an_error() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()


def test_blocks_are_allocated_all_or_none_with_the_content_that_each_evicts() -> None:
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.on_evicted = evicted.append
    pool.register_blocks(pool.allocate_blocks(3), [1, 2, 1])
    with pytest.raises(IndexError):
        pool.allocate_blocks(2)
    assert pool.free == 1
    pool.release([0, 1, 2])
    # The block without content is reused first, then the end of the prompt.
    assert pool.allocate_blocks(4) == [2, 3, 1, 0]
    assert evicted == [2, 1]


def test_the_longest_unused_content_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    old = [pool.allocate(), pool.allocate()]
    for block, key in zip(old, (1, 2), strict=True):
        pool.register(block, key)
    new = [pool.allocate(), pool.allocate()]
    for block, key in zip(new, (3, 4), strict=True):
        pool.register(block, key)
    pool.release(old)
    pool.release(new)
    pool.allocate()
    assert (pool.count_hits([1, 2], 2), pool.count_hits([3, 4], 2)) == (1, 2)
    pool.allocate()
    assert (pool.count_hits([1, 2], 2), pool.count_hits([3, 4], 2)) == (0, 2)


def test_unregistered_content_is_evicted_before_cached_content() -> None:
    pool = BlockPool(2)
    named, plain = pool.allocate(), pool.allocate()
    pool.register(named, 7)
    pool.release([named])
    pool.release([plain])
    assert pool.allocate() == plain
    assert pool.count_hits([7], 1) == 1
