"""Tests of the index of cached prompts: old entries are dropped as in an engine's cache."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from random import Random

import pytest

from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.predicted_cache import MAX_SLOTS
from policies.prefix.prefix_index import BLOCK_COST_BYTES, PrefixIndex

PRINTS = Fingerprinter(b"sixteen bytes at least")
BLOCK = PRINTS.block_bytes


def prompt_of(name: int, blocks: int) -> Fingerprint:
    return PRINTS.fingerprint(b"salt", Random(name).randbytes(blocks * BLOCK))


def test_an_empty_index_believes_nothing() -> None:
    assert PrefixIndex(1 << 20).match(prompt_of(1, 8), 100) == []


def test_belief_is_scaled_from_bytes_to_tokens() -> None:
    index = PrefixIndex(1 << 20)
    text = Random(1).randbytes(4 * BLOCK)
    index.insert(PRINTS.fingerprint(b"", text[: 3 * BLOCK]), 1, 192)
    assert index.match(PRINTS.fingerprint(b"", text), 256) == [0, 192]
    assert index.match(PRINTS.fingerprint(b"", text), 1024) == [0, 768]


def test_a_long_prompt_is_believed_to_within_a_hundredth_and_has_entries_for_a_quarter_of_its_blocks() -> (
    None
):
    index = PrefixIndex(1 << 20)
    text = Random(1).randbytes(3000 * BLOCK)
    index.insert(PRINTS.fingerprint(b"", text), 0, 3000)
    assert index.stats().blocks < 750
    for blocks in (64, 256, 257, 700, 1777, 2999):
        believed = index.match(
            PRINTS.fingerprint(b"", text[: blocks * BLOCK] + bytes(BLOCK)), blocks + 1
        )[0]
        assert blocks * 127 / 128 - 1 <= believed <= blocks


def test_each_slot_is_believed_as_far_as_its_own_prompts_went() -> None:
    index = PrefixIndex(1 << 20)
    text = Random(1).randbytes(60 * BLOCK)
    depths = [60, 1, 17, 0, 42, 42]
    for slot in Random(2).sample(range(6), 6):
        index.insert(PRINTS.fingerprint(b"", text[: depths[slot] * BLOCK]), slot, depths[slot])
    assert index.match(PRINTS.fingerprint(b"", text), 60) == depths


def test_ageing_follows_an_exact_lru_to_within_a_generation() -> None:
    # Random documents of 8 blocks, compared with an OrderedDict as the engine's cache.
    #
    # Recent documents stay, old ones expire.
    capacity, size, slack = 4096, 64, 4096 // 32 + 64
    index, engine, rng = PrefixIndex(8 << 20), OrderedDict[int, None](), Random(3)
    index.set_capacity(0, capacity)
    for _ in range(4000):
        document = int(rng.paretovariate(0.6))
        index.insert(prompt_of(document % 500, 8), 0, size)
        engine[document % 500] = None
        engine.move_to_end(document % 500)
    by_age = list(reversed(engine))
    believed = [index.match(prompt_of(document, 8), size) == [size] for document in by_age]
    assert all(believed[: (capacity - slack) // size])
    assert not any(believed[(capacity + slack) // size :])


def test_forgetting_a_slot_leaves_the_others_alone() -> None:
    index = PrefixIndex(1 << 20)
    for slot in (0, 1):
        index.insert(prompt_of(1, 8), slot, 8)
    index.forget(0)
    index.forget(7)
    assert index.match(prompt_of(1, 8), 8) == [0, 8]
    index.insert(prompt_of(1, 4), 0, 4)
    assert index.match(prompt_of(1, 8), 8) == [4, 8]


def test_a_slot_keeps_its_capacity_when_its_content_is_forgotten() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 1000)
    index.forget(0)
    for name in range(100):
        index.insert(prompt_of(name, 10), 0, 100)
    assert index.stats().cached_tokens[0] <= 1000


def test_a_prompt_that_never_got_its_first_token_is_believed_no_further_than_before() -> None:
    index = PrefixIndex(1 << 20)
    text = Random(1).randbytes(8 * BLOCK)
    index.insert(PRINTS.fingerprint(b"", text[: 2 * BLOCK]), 0, 2)
    index.insert(PRINTS.fingerprint(b"", text), 0, 8)
    index.trim(PRINTS.fingerprint(b"", text), 0, kept_tokens=2, prompt_tokens=8)
    index.trim(PRINTS.fingerprint(b"", text), 9, kept_tokens=2, prompt_tokens=8)
    assert index.match(PRINTS.fingerprint(b"", text), 8) == [2]
    assert index.stats().cached_tokens == (2,)


def test_answers_that_find_less_than_believed_shrink_the_believed_capacity() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 1000)
    for name in range(10):
        index.insert(prompt_of(name, 10), 0, 100)
    before = index.stats().cached_tokens[0]
    for _ in range(20):
        index.confirm(0, believed_share=0.9, cached_share=0.0)
    after = index.stats().cached_tokens[0]
    assert after < before / 2
    for _ in range(100):
        index.confirm(0, believed_share=0.9, cached_share=0.9)
    for name in range(10):
        index.insert(prompt_of(name, 10), 0, 100)
    assert index.stats().cached_tokens[0] > 900


def test_an_unknown_capacity_is_first_estimated_when_a_belief_fails() -> None:
    index = PrefixIndex(8 << 20)
    for name in range(100):
        index.insert(prompt_of(name, 10), 0, 100)
    index.confirm(0, believed_share=1.0, cached_share=0.0)
    for name in range(100, 200):
        index.insert(prompt_of(name, 10), 0, 100)
    assert index.stats().cached_tokens[0] <= 10_000


def test_small_disagreements_teach_nothing() -> None:
    index = PrefixIndex(8 << 20)
    index.insert(prompt_of(1, 10), 0, 100)
    index.confirm(0, believed_share=0.9, cached_share=0.85)
    index.confirm(0, believed_share=0.05, cached_share=0.0)
    index.confirm(3, believed_share=1.0, cached_share=0.0)
    assert index.match(prompt_of(1, 10), 100) == [100]


def test_the_cap_holds_in_real_memory_under_churn() -> None:
    cap = 4 << 20
    prompts = [prompt_of(name, 48) for name in range(1500)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex(cap)
        rng = Random(4)
        for number in range(6000):
            index.insert(prompts[int(1500 * rng.random() ** 2)], number % 4, 3000)
            assert index.stats().blocks <= cap // BLOCK_COST_BYTES
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before <= cap
    finally:
        tracemalloc.stop()
    assert index.stats().evictions > 0
    assert index.stats().bytes <= cap


def test_entries_are_invisible_to_the_garbage_collector() -> None:
    # A full collection over a million tracked entries would stop the event loop for tens of ms.
    index = PrefixIndex(1 << 20)
    for slot in range(40):
        index.insert(prompt_of(1, 64), slot, 64)
    assert not any(gc.is_tracked(shard) for shard in index._shards)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        PrefixIndex(1000)
    with pytest.raises(ValueError, match="not 65536"):
        PrefixIndex(1 << 20).set_capacity(MAX_SLOTS, 1)


def test_cached_tokens_of_a_slot_are_read_in_constant_time() -> None:
    index, prompt = PrefixIndex(1 << 20), prompt_of(1, 20)
    index.insert(prompt, 3, 2000)
    assert index.cached_tokens(3) == pytest.approx(2000)
    assert index.cached_tokens(0) == index.cached_tokens(99) == 0.0
    index.forget(3)
    assert index.cached_tokens(3) == 0.0


def insert_in_turn(index: PrefixIndex, documents: range, rounds: int, slot: int = 0) -> None:
    for _ in range(rounds):
        for document in documents:
            index.insert(prompt_of(document, 8), slot, 512)


def test_evictions_of_blocks_not_requested_again_are_not_regretted() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 512 * 32)
    insert_in_turn(index, range(400), 1)
    assert index.cached_tokens(0) <= 512 * 32
    assert index.eviction_regret(0) == 0.0
    assert index.eviction_regret(7) == 0.0


def test_evictions_of_blocks_requested_again_are_regretted_until_they_decay() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 512 * 32)
    insert_in_turn(index, range(48), 8)
    assert index.eviction_regret(0) > 0.7
    insert_in_turn(index, range(1000, 1400), 1)
    assert index.eviction_regret(0) < 0.01


def test_an_eviction_is_not_regretted_while_another_slot_has_the_block() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 512 * 32)
    insert_in_turn(index, range(48), 2, slot=1)
    insert_in_turn(index, range(48), 1)
    insert_in_turn(index, range(48), 3, slot=1)
    assert index.eviction_regret(0) == 0.0


def test_a_restarted_endpoint_regrets_nothing() -> None:
    index = PrefixIndex(8 << 20)
    index.set_capacity(0, 512 * 32)
    insert_in_turn(index, range(20), 1)
    index.forget(0)
    insert_in_turn(index, range(20), 1)
    assert index.eviction_regret(0) == 0.0


def test_a_prompt_that_comes_again_and_again_leaves_nothing_behind_in_the_books() -> None:
    index, prompt = PrefixIndex(1 << 20), prompt_of(1, 20)
    index.set_capacity(0, 1000)
    index.insert(prompt_of(2, 1), 0, 5)
    for _ in range(200):
        index.insert(prompt, 0, 100)
    assert len(index._holders[0].tokens) <= 3
    assert index.cached_tokens(0) == pytest.approx(105)
    assert index.match(prompt, 100) == [100]
    assert index.match(prompt_of(2, 1), 5) == [5]


@pytest.mark.parametrize("endpoints", [8, 9, 12, 33, 64, 200])
def test_the_cap_holds_however_many_endpoints_hold_each_block(endpoints: int) -> None:
    cap = 256 << 10
    prompts = [prompt_of(name, 1) for name in range(cap // BLOCK_COST_BYTES)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex(cap)
        index.set_capacity(endpoints - 1, None)
        books = tracemalloc.get_traced_memory()[0] - before
        for slot in range(endpoints):
            for prompt in prompts:
                index.insert(prompt, slot, 128)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before - books <= cap
    finally:
        tracemalloc.stop()
    assert index.stats().bytes <= cap


def test_room_that_many_holders_took_is_given_back_when_they_are_gone() -> None:
    index, prompt = PrefixIndex(1 << 20), prompt_of(1, 4)
    index.insert(prompt, 0, 4)
    narrow = index.stats().bytes
    for slot in range(1, 40):
        index.insert(prompt, slot, 4)
    assert index.stats().bytes > narrow
    for slot in range(20, 40):
        index.trim(prompt, slot, kept_tokens=0, prompt_tokens=4)
    for slot in range(20):
        index.forget(slot)
    index.insert(prompt, 0, 4)
    assert index.stats().bytes == narrow


def test_blocks_that_many_held_give_back_their_room_when_they_are_dropped() -> None:
    cap = 128 << 10
    index = PrefixIndex(cap)
    for slot in range(64):
        for name in range(100):
            index.insert(prompt_of(name, 1), slot, 128)
    for name in range(1000, 4000):
        index.insert(prompt_of(name, 1), 0, 128)
    assert index.stats().blocks > 0.9 * cap / BLOCK_COST_BYTES


def test_a_prompt_that_was_estimated_longer_the_second_time_takes_no_belief_from_its_contemporaries() -> (
    None
):
    index, again, other = PrefixIndex(1 << 20), prompt_of(1, 10), prompt_of(2, 10)
    index.set_capacity(0, 3200)
    index.insert(again, 0, 100)
    index.insert(other, 0, 100)
    index.insert(again, 0, 250)
    assert index.match(other, 100) == [100]


def test_slots_that_remain_of_many_are_believed_as_far_as_their_prompts_went() -> None:
    index, text = PrefixIndex(1 << 20), Random(1).randbytes(2 * BLOCK)
    beginning, whole = (PRINTS.fingerprint(b"", text[: n * BLOCK]) for n in (1, 2))
    for slot in range(48):
        index.insert(whole, slot, 128)
    for slot in range(40):
        index.forget(slot)
    index.set_capacity(47, 1000)  # so that its stamp changes
    for slot in (47, 50):  # of the first block, expired holders are removed
        index.insert(beginning, slot, 64)
    expected = [*[0] * 40, *[128] * 8, 0, 0, 64]
    assert index.match(whole, 128) == list(index.match_holders(whole, 128)) == expected
