"""Tests of the KV cache in which engines find what any of them has computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.replay.ideal_pool import IdealPool


def test_a_block_that_another_engine_computed_is_found_and_takes_memory() -> None:
    everywhere: set[int] = set()
    first, second = IdealPool(4, 16, everywhere), IdealPool(4, 16, everywhere)
    first.register_blocks(first.allocate_blocks(2), [7, 8])

    assert second.count_hits([7, 8, 9], 3) == 2
    assert second.count_free_hits([7, 8], 2) == 2
    assert len(set(second.acquire_cached([7, 8], 2))) == 2
    assert second.free == 2
    assert second.count_free_hits([7, 8], 2) == 0
    second.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=30))
def test_free_blocks_fall_by_what_was_counted(steps: list[tuple[bool, int, int]]) -> None:
    everywhere: set[int] = set()
    pools, held = [IdealPool(8, 16, everywhere) for _ in range(2)], [[], []]  # type: ignore[var-annotated]
    for is_second, first, length in steps:
        pool, taken = pools[is_second], held[is_second]
        keys = [10 * first + index for index in range(length)]
        hits = pool.count_hits(keys, length)
        needed = length - hits + pool.count_free_hits(keys, hits)
        if needed > pool.free:
            pool.release(taken.pop())
            continue
        free = pool.free
        blocks = pool.acquire_cached(keys, hits)
        blocks += pool.allocate_blocks(length - hits)
        pool.register_blocks(blocks, keys)
        taken.append(blocks)
        assert pool.free == free - needed
        pool.check()
