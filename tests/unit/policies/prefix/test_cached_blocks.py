"""Tests of the index of blocks that several engines report as cached."""

from __future__ import annotations

import pytest

from policies.prefix.cached_blocks import (
    CPU,
    GPU,
    CachedBlocks,
    SourceBlocks,
    chain_keys,
    scope_seed,
)

SIZE, SEED = 4, scope_seed("", "")
TOKENS = list(range(40))


def reach(index: CachedBlocks, source: SourceBlocks, seed: int = SEED) -> int:
    levels = index.levels(chain_keys(TOKENS, SIZE, seed), 10)
    return max((length for length, bits in levels if bits & source.bit), default=0)


def store(source: SourceBlocks, blocks: int, first: int = 0, **options: object) -> None:
    names = [source.bit * 1000 + place for place in range(first, blocks)]
    parent = source.bit * 1000 + first - 1 if first else None
    tokens = TOKENS[SIZE * first : SIZE * blocks]
    source.store(names, parent, tokens, SIZE, **{"seed": SEED, **options})


def test_each_source_holds_a_chain_as_far_as_it_has_stored_it() -> None:
    index = CachedBlocks(1 << 20)
    sources = [SourceBlocks(index) for _ in range(3)]
    for source, blocks in zip(sources, (10, 4, 0), strict=True):
        store(source, blocks)
    assert [reach(index, source) for source in sources] == [10, 4, 0]
    store(sources[1], 7, first=4)
    assert reach(index, sources[1]) == 7
    sources[0].remove([sources[0].bit * 1000 + place for place in (9, 8)])
    assert reach(index, sources[0]) == 8


def test_blocks_of_another_salt_or_adapter_or_with_images_never_match() -> None:
    index = CachedBlocks(1 << 20)
    plain, salted, image = (SourceBlocks(index) for _ in range(3))
    store(plain, 10)
    store(salted, 10, seed=scope_seed("", "tenant"))
    store(image, 10, mixed=[0, 0, 7, 0, 0, 0, 0, 0, 0, 0])
    assert [reach(index, source) for source in (plain, salted, image)] == [10, 0, 2]
    assert reach(index, salted, scope_seed("", "tenant")) == 10
    assert scope_seed("a", "") != scope_seed("", "a")


def test_a_block_stays_until_it_has_left_every_medium() -> None:
    index = CachedBlocks(1 << 20)
    source = SourceBlocks(index)
    store(source, 10)
    store(source, 10, medium=CPU)
    source.remove([source.bit * 1000], GPU)
    assert reach(index, source) == 10
    source.remove([source.bit * 1000], CPU)
    assert reach(index, source) == 0


def test_blocks_without_tokens_or_without_a_known_parent_get_no_credit() -> None:
    index = CachedBlocks(1 << 20)
    source = SourceBlocks(index)
    source.store([1, 2], None, [], SIZE, seed=SEED)
    source.store([3], 99, TOKENS[:4], SIZE)
    assert (len(source), index.holders) == (3, {})


def test_a_cleared_source_is_empty_at_once_and_purged_in_slices() -> None:
    index = CachedBlocks(1 << 20)
    source, other = SourceBlocks(index), SourceBlocks(index)
    store(source, 10)
    store(other, 5)
    source.clear()
    assert (reach(index, source), len(source), index.blocks) == (0, 0, 15)
    assert index.purge(4)
    assert not index.purge(100)
    assert (index.blocks, len(index.holders), reach(index, other)) == (5, 5, 5)


def test_storing_again_changes_nothing() -> None:
    index = CachedBlocks(1 << 20)
    source = SourceBlocks(index)
    store(source, 10)
    store(source, 10)
    assert (len(source), index.blocks) == (10, 10)


@pytest.mark.parametrize("token", [-1, 1 << 32, "a"])
def test_tokens_that_are_no_unsigned_numbers_are_refused(token: object) -> None:
    source = SourceBlocks(CachedBlocks(1 << 20))
    with pytest.raises((OverflowError, TypeError)):
        source.store([1], None, [token, 1, 2, 3], SIZE, seed=SEED)
