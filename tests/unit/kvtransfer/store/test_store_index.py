"""Tests by example of which blocks a KV store keeps in memory and on disk, and which it evicts."""

from __future__ import annotations

from kvtransfer.store.store_index import IN_MEMORY, ON_DISK, StoreIndex

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"ABCDE")


def stored(index: StoreIndex, *keys: bytes) -> None:
    for key in keys:
        assert index.begin_write(key, 0.0) is not None
        index.end_write(key, is_complete=True)
    index.use(keys)


def saved(index: StoreIndex) -> None:
    copies = []
    while (copy := index.begin_save()) is not None:
        copies.append(copy)
    for copy in reversed(copies):  # a store ends its saves in this order
        index.end_save(copy, is_complete=True)


def test_the_last_block_of_the_longest_unused_prompt_is_evicted_first() -> None:
    index = StoreIndex(4)
    stored(index, A, B)
    stored(index, C, D)
    stored(index, E)
    assert index.count_prefix([A, B]) == 1
    assert index.count_prefix([C, D]) == 2


def test_a_prompt_that_was_read_is_evicted_last() -> None:
    index = StoreIndex(4)
    stored(index, A, B)
    stored(index, C, D)
    lease, _ = index.acquire(1, [A, B], 0.0)
    index.release(1, lease)
    index.use([A, B])
    stored(index, E)
    assert index.count_prefix([A, B]) == 2
    assert index.count_prefix([C, D]) == 1


def test_the_prefix_ends_at_the_first_block_that_no_tier_has() -> None:
    index = StoreIndex(2, 4)
    stored(index, A, B)
    saved(index)
    stored(index, D)
    assert index.places(A) == IN_MEMORY | ON_DISK
    assert index.places(B) == ON_DISK
    assert index.count_prefix([A, B, C, D]) == 2


def test_a_block_that_a_reader_has_leased_survives_any_number_of_writes() -> None:
    index = StoreIndex(2)
    stored(index, A)
    lease, slots = index.acquire(1, [A], 0.0)
    for key in (B, C, D):
        stored(index, key)
    assert index.memory.find(A) == slots[0]
    index.release(1, lease)
    stored(index, E)
    stored(index, B)
    assert index.places(A) == 0


def test_a_lease_of_a_killed_reader_ends_with_its_connection_and_another_ones_stays() -> None:
    index = StoreIndex(1)
    stored(index, A)
    index.acquire(1, [A], 0.0)
    index.acquire(2, [A], 0.0)
    index.end_owner(1)
    assert index.begin_write(B, 0.0) is None
    index.end_owner(2)
    assert index.begin_write(B, 0.0) is not None


def test_a_stopped_reader_holds_blocks_until_its_lease_expires() -> None:
    index = StoreIndex(1, lease_s=5.0)
    stored(index, A)
    index.acquire(1, [A], 10.0)
    assert index.begin_write(B, 14.9) is None
    assert index.begin_write(B, 15.0) is not None
    assert index.counters.expired == 1
    assert index.counters.refused == 1


def test_eight_readers_share_one_slot() -> None:
    index = StoreIndex(1)
    stored(index, A)
    leases = [index.acquire(owner, [A], 0.0) for owner in range(8)]
    assert {slot for _, slots in leases for slot in slots} == {0}
    for owner, (number, _) in enumerate(leases):
        assert index.begin_write(B, 0.0) is None
        index.release(owner, number)
    assert index.begin_write(B, 0.0) is not None


def test_a_writer_is_not_asked_for_a_block_that_another_one_is_writing() -> None:
    index = StoreIndex(2)
    index.begin_write(A, 0.0)
    assert not index.wants(A)
    assert index.count_prefix([A]) == 0
    index.end_write(A, is_complete=False)
    assert index.wants(A)
    assert index.counters.aborted == 1


def test_a_damaged_block_on_disk_is_forgotten_and_an_unreadable_one_is_not() -> None:
    index = StoreIndex(2, 2)
    stored(index, A, B)
    saved(index)
    stored(index, C, D)
    for key, is_readable in ((A, True), (B, False)):
        copy = index.begin_load(key, 0.0)
        assert copy is not None
        index.end_load(copy, is_intact=False, is_readable=is_readable)
    assert index.places(A) == 0
    assert index.places(B) == ON_DISK
    assert (index.counters.corrupt, index.counters.failed) == (1, 1)


def test_a_block_that_was_loaded_is_not_saved_again() -> None:
    index = StoreIndex(1, 2)
    stored(index, A)
    saved(index)
    stored(index, B)
    saved(index)
    copy = index.begin_load(A, 0.0)
    assert copy is not None
    index.end_load(copy, is_intact=True)
    assert index.begin_save() is None
    assert index.counters.saved == 2


def test_counters_say_whether_an_evicted_block_is_on_disk() -> None:
    index = StoreIndex(1, 4)
    stored(index, A)
    saved(index)
    stored(index, B)
    stored(index, C)
    assert (index.counters.evicted, index.counters.lost) == (1, 1)
