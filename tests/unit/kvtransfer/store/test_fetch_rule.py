"""Tests of the rule that decides how many stored KV blocks to fetch, and how many to compute.

It learns how long both take.
"""

from __future__ import annotations

from random import Random

import pytest

from kvtransfer.store.cost_fit import CostFit
from kvtransfer.store.fetch_rule import STALE_S, FetchRule, StoredPrefix

BLOCK_TOKENS, STEP_TOKENS = 16, 8192
MEMORY, DISK = b"\x01", b"\x02"


def rule_of(
    token_s: float = 1e-4, memory_s: float | None = 1e-4, disk_s: float | None = None
) -> FetchRule:
    # Return a rule that has measured seconds per token, and per block of each tier.
    rule = FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    for tokens in (1024, 2048, 4096):
        rule.on_step(tokens, 0.0, tokens * token_s)
    now = -10.0
    for blocks in (64, 128, 256):
        if memory_s is not None:
            now = read(rule, MEMORY * blocks, now, blocks * memory_s)
        if memory_s is not None and disk_s is not None:
            now = read(rule, DISK * blocks, now, blocks * (memory_s + disk_s))
    return rule


def read(rule: FetchRule, places: bytes, now: float, seconds: float) -> float:
    pending = rule.begin(places, now)
    rule.end(pending, now + seconds, is_complete=True)
    return now + seconds


def prefix(places: bytes, tokens: int = 8192, start: int = 0, busy_s: float = 0.0) -> StoredPrefix:
    return StoredPrefix(start, tokens, places, busy_s)


def test_a_fit_finds_the_rates_of_all_amounts() -> None:
    fit, random = CostFit(3), Random(1)
    for _ in range(30):
        amounts = (1.0, random.randrange(1, 9000), random.randrange(1, 10**7))
        seconds = 0.005 * amounts[0] + 2e-5 * amounts[1] + 3e-9 * amounts[2]
        fit.add(amounts, seconds, seconds)
    assert fit.samples == 30
    assert fit.rates() == pytest.approx([0.005, 2e-5, 3e-9], rel=1e-3)


def test_a_fit_never_has_negative_rates() -> None:
    fit = CostFit(2)
    for size in (10.0, 20.0, 40.0):
        fit.add((1.0, size), 100.0 / size, 1.0)
    assert min(fit.rates()) >= 0
    assert fit.rates()[0] > 0


def test_an_amount_that_was_never_measured_costs_nothing() -> None:
    fit = CostFit(2)
    assert list(fit.rates()) == [0.0, 0.0]
    fit.add((1.0, 0.0), 3.0, 3.0)
    assert fit.rates() == pytest.approx([3.0, 0.0])


def test_a_fit_follows_a_change() -> None:
    fit = CostFit(1)
    for _ in range(50):
        fit.add((1.0,), 1.0, 1.0)
    for _ in range(30):
        fit.add((1.0,), 4.0, 4.0)
    assert fit.rates()[0] == pytest.approx(4.0, rel=0.5)


def test_a_tier_that_is_faster_than_computing_is_fetched_whole() -> None:
    assert rule_of(memory_s=1e-4).choose(prefix(MEMORY * 511), 0.0) == 511


def test_a_tier_that_is_slower_than_computing_is_not_fetched() -> None:
    assert rule_of(memory_s=5e-3).choose(prefix(MEMORY * 511), 0.0) == 0


def test_the_part_in_memory_is_fetched_and_the_part_on_a_slow_disk_computed() -> None:
    rule = rule_of(memory_s=1e-4, disk_s=5e-3)
    assert rule.choose(prefix(MEMORY * 100 + DISK * 200), 0.0) == 100


def test_a_slow_part_is_fetched_for_the_fast_part_behind_it() -> None:
    rule = rule_of(memory_s=1e-4, disk_s=5e-3)
    assert rule.choose(prefix(DISK * 10 + MEMORY * 490), 0.0) == 500


def test_blocks_behind_a_missing_one_are_not_fetched() -> None:
    assert rule_of().choose(prefix(MEMORY * 5 + b"\0" + MEMORY * 5), 0.0) == 5
    assert rule_of().choose(prefix(b""), 0.0) == 0


def test_only_the_first_runs_of_a_prompt_are_looked_at() -> None:
    rule = rule_of(memory_s=1e-4, disk_s=1e-4)
    assert rule.choose(prefix((MEMORY + DISK) * 250), 0.0) == 64


def test_a_slow_fetch_is_used_as_far_as_other_prompts_hide_it() -> None:
    rule = rule_of(memory_s=2e-3)
    assert rule.choose(prefix(MEMORY * 511), 0.0) == 0
    assert rule.choose(prefix(MEMORY * 511, busy_s=0.2), 0.0) == 100
    assert rule.choose(prefix(MEMORY * 511, busy_s=2.0), 0.0) == 511


def test_a_fetch_waits_for_those_before_it() -> None:
    rule = rule_of(memory_s=1e-3)
    assert rule.choose(prefix(MEMORY * 511), 0.0) == 511
    first = rule.begin(MEMORY * 511, 0.0)
    assert rule.choose(prefix(MEMORY * 511), 0.0) == 0
    assert rule.choose(prefix(MEMORY * 511), 0.4) == 511
    rule.end(first, 0.5, is_complete=True)
    assert rule.choose(prefix(MEMORY * 511), 0.5) == 511


def test_waiting_is_not_counted_as_the_cost_of_a_fetch() -> None:
    rule = rule_of(memory_s=1e-3)
    fetches = [rule.begin(MEMORY * 200, 0.0) for _ in range(20)]
    for number, fetch in enumerate(fetches, 1):
        rule.end(fetch, 0.2 * number, is_complete=True)
    assert rule.choose(prefix(MEMORY * 511), 4.0) == 511


def test_attention_makes_the_end_of_a_prompt_worth_more() -> None:
    rule = FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    for start in (0, 10_000, 40_000):
        rule.on_step(1000, 1000 * (start + 500), 1e-8 * 1000 * (start + 500))
    for blocks in (64, 128, 256):
        read(rule, MEMORY * blocks, -10.0 + blocks, blocks * 1e-3)
    assert rule.choose(prefix(MEMORY * 511), 260.0) == 0
    assert rule.choose(prefix(MEMORY * 511, 40_192, 32_000), 260.0) == 511


def test_an_engine_that_has_computed_nothing_fetches_from_memory_alone() -> None:
    rule = FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    assert rule.choose(prefix(MEMORY * 30 + DISK * 30), 0.0) == 30


def test_an_unknown_disk_is_measured_in_small_and_growing_reads() -> None:
    rule = rule_of(memory_s=1e-4)
    now, reads = 0.0, []
    for _ in range(4):
        count = rule.choose(prefix(DISK * 512), now)
        reads.append(count)
        now = read(rule, DISK * count, now, count * 3e-4)
    assert reads == [8, 32, 128, 512]


def test_the_reads_of_a_very_slow_disk_stay_small() -> None:
    rule = rule_of(token_s=1e-4, memory_s=1e-4)
    now, spent_s = 0.0, 0.0
    for _ in range(20):
        count = rule.choose(prefix(DISK * 512), now)
        spent_s += count * 0.05
        now = read(rule, DISK * count, now, count * 0.05)
    assert spent_s < 2 * 0.8192, "two computations of the prompt, 17 s in full for all 20"


def test_one_read_of_an_unknown_disk_is_made_at_a_time() -> None:
    rule = rule_of(memory_s=1e-4)
    rule.begin(DISK * rule.choose(prefix(DISK * 512), 0.0), 0.0)
    assert rule.choose(prefix(DISK * 512), 0.0) == 0


def test_a_tier_that_became_fast_is_found_again() -> None:
    rule = rule_of(memory_s=1e-4, disk_s=5e-3)
    assert rule.choose(prefix(DISK * 511), 0.0) == 0
    now, asked, counts = STALE_S, 0, [0]
    while counts[-1] < 511:
        counts.append(rule.choose(prefix(DISK * 511), now))
        asked += 1
        now = read(rule, DISK * counts[-1], now, counts[-1] * 2e-4) + STALE_S
        assert asked < 30
    assert 0 < counts[1] < 20, "a small read"


def test_a_fetch_that_failed_teaches_nothing() -> None:
    rule = rule_of(memory_s=1e-4)
    lost = rule.begin(MEMORY * 100, 0.0)
    rule.end(lost, 10.0, is_complete=False)
    assert rule.choose(prefix(MEMORY * 511), 10.0) == 511


def test_times_of_zero_are_no_error() -> None:
    rule = rule_of(token_s=0.0, memory_s=0.0, disk_s=0.0)
    assert rule.choose(prefix(MEMORY * 5 + DISK * 5), 0.0) == 10
