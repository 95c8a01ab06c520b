"""Property tests of the rule that decides how many stored KV blocks to fetch, and how many to
compute.

It makes the fastest choice by its own estimates. In simulated time, this is close to the best
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.store.fetch_rule import STALE_S, FetchRule, StoredPrefix

BLOCK_BYTES, BLOCK_TOKENS, STEP_TOKENS = 2 << 20, 16, 8192
MEMORY, DISK = 1, 2

costs = st.floats(0.0, 1.0)
tiers = st.lists(st.tuples(st.sampled_from(b"\x01\x02\x03"), st.integers(1, 40)), max_size=5)


class World:
    """A simulated engine with a KV store, where fetching and computing take times that the test
    knows.

    The times are given as seconds per unit of each kind of work, such as blocks read. The tested
    rule must learn them.
    """

    def __init__(self, random: Random) -> None:
        self.memory_s = BLOCK_BYTES / (random.choice([5, 12.5, 25]) * 1e9)
        self.disk_s = BLOCK_BYTES / (random.choice([0.2, 1, 3, 5, 8, 12.5]) * 1e9)
        self.memory_latency_s = random.choice([0.0, 1e-3])
        self.disk_latency_s = random.choice([0.0, 1e-3, 2e-2])
        self.step_s = random.choice([5e-3, 2e-2])
        self.token_s = random.choice([1e-5, 2.2e-5, 1e-4, 4e-4])
        self.pair_s = self.token_s / random.choice([2e4, 1e5])

    def fetch_s(self, places: bytes) -> float:
        on_disk = places.count(DISK)
        latency_s = bool(places) * self.memory_latency_s + bool(on_disk) * self.disk_latency_s
        return latency_s + len(places) * self.memory_s + on_disk * self.disk_s

    def steps(self, start: int, end: int) -> Iterator[tuple[int, float, float]]:
        """Yield (tokens, attention pairs, seconds) of each engine step that computes these
        tokens.
        """
        while start < end:
            tokens = min(STEP_TOKENS, end - start)
            pairs = tokens * (start + tokens / 2)
            yield tokens, pairs, self.step_s + self.token_s * tokens + self.pair_s * pairs
            start += tokens

    def ttft_s(self, places: bytes, fetched: int, tokens: int) -> float:
        steps = self.steps(fetched * BLOCK_TOKENS, tokens)
        return self.fetch_s(places[:fetched]) + sum(seconds for _, _, seconds in steps)


def learned(rule: FetchRule, world: World) -> None:
    # Let a rule measure every cost of the world, without noise.
    for tokens in (500, 3000, 8192, 20_000):
        for step in world.steps(0, tokens):
            rule.on_step(*step)
    now = 0.0
    for places in (b"\1" * 9, b"\1" * 70, b"\2" * 5, b"\2" * 40, b"\1\2" * 60, b"\2" * 200):
        pending = rule.begin(places, now)
        now += world.fetch_s(places)
        rule.end(pending, now, is_complete=True)


@given(seed=st.integers(0, 1 << 30), runs=tiers, start=st.integers(0, 50), busy_s=costs)
def test_no_other_number_of_blocks_has_a_smaller_expected_time(
    seed: int, runs: list[tuple[int, int]], start: int, busy_s: float
) -> None:
    world, rule = World(Random(seed)), FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    learned(rule, world)
    places = b"".join(bytes([tier]) * length for tier, length in runs)
    only = places.translate(bytes([0, 1, 2, 1]) + bytes(252))
    first = start * BLOCK_TOKENS
    tokens = first + len(places) * BLOCK_TOKENS + 1

    def expected_s(count: int) -> float:
        fetched_s = rule.fetch_s(count, only[:count].count(DISK))
        return max(fetched_s, busy_s) + rule.compute_s(first + count * BLOCK_TOKENS, tokens)

    count = rule.choose(StoredPrefix(first, tokens, places, busy_s), 1.0)
    best_s = min(map(expected_s, range(len(places) + 1)))
    assert expected_s(count) <= best_s * (1 + 1e-3) + 1e-6


def simulated(seed: int, noise: float, change: bool) -> tuple[float, float, float, float]:
    # Simulate 300 stored prompts that are requested again, and return four sums of their TTFT: with
    # the rule's choices, with all blocks computed, with all fetched, and with the best choices.
    #
    # The first 20 prompts are not counted, nor are the 20 after a change of the disk.
    random = Random(seed)
    world, rule = World(random), FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    now, sums, uncounted = 0.0, [0.0] * 4, 20
    for number in range(300):
        if change and number == 150:
            world.disk_s = BLOCK_BYTES / (random.choice([0.2, 1, 3, 5, 8, 12.5]) * 1e9)
            uncounted = 20
        tokens = random.choice([1024, 2048, 8192, 32_768]) + random.randrange(2000)
        stored = random.choice([0, 1, 1, 0.5]) * ((tokens - 1) // BLOCK_TOKENS)
        in_memory = int(random.choice([0, 1, 0.5]) * stored)
        places = b"\1" * in_memory + b"\2" * (int(stored) - in_memory)
        count = rule.choose(StoredPrefix(0, tokens, places), now)
        if not uncounted:
            choices = (count, 0, len(places))
            times = [world.ttft_s(places, choice, tokens) for choice in (*choices, in_memory)]
            sums = [a + b for a, b in zip(sums, [*times[:3], min(times)], strict=True)]
        uncounted = max(0, uncounted - 1)
        if count:
            pending = rule.begin(places[:count], now)
            now += world.fetch_s(places[:count]) * random.uniform(1 - noise, 1 + noise)
            rule.end(pending, now, is_complete=True)
        for size, pairs, seconds in world.steps(count * BLOCK_TOKENS, tokens):
            step_s = seconds * random.uniform(1 - noise, 1 + noise)
            rule.on_step(size, pairs, step_s)
            now += step_s
        now += random.expovariate(1 / (STALE_S / 2) if change else 1.0)
    return sums[0], sums[1], sums[2], sums[3]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_prompts_wait_hardly_longer_than_with_the_better_choice_for_each(noise: float) -> None:
    for seed in range(2000, 2020):
        chosen_s, computed_s, fetched_s, best_s = simulated(seed, noise, change=False)
        assert chosen_s <= (1.08 + noise / 4) * best_s, seed
        assert chosen_s <= (1.05 + noise / 10) * min(computed_s, fetched_s), seed


def test_a_disk_that_becomes_faster_or_slower_is_followed() -> None:
    for seed in range(2100, 2120):
        chosen_s, computed_s, fetched_s, _ = simulated(seed, 0.1, change=True)
        assert chosen_s <= 1.15 * min(computed_s, fetched_s), seed


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), error=st.floats(0.0, 0.5), runs=tiers)
def test_a_choice_is_worse_than_the_best_by_at_most_the_errors_of_both_estimates(
    seed: int, error: float, runs: list[tuple[int, int]]
) -> None:
    random = Random(seed)
    world, rule = World(random), FetchRule(BLOCK_TOKENS, STEP_TOKENS)
    learned(rule, world)
    places = b"".join(bytes([tier]) * length for tier, length in runs).replace(b"\3", b"\1")
    tokens = len(places) * BLOCK_TOKENS + 1
    expected = [
        rule.fetch_s(count, places[:count].count(DISK))
        + rule.compute_s(count * BLOCK_TOKENS, tokens)
        for count in range(len(places) + 1)
    ]
    true = [seconds * random.uniform(1 - error, 1 + error) for seconds in expected]
    count = rule.choose(StoredPrefix(0, tokens, places), 1.0)
    best = min(range(len(true)), key=true.__getitem__)
    errors_s = abs(true[count] - expected[count]) + abs(true[best] - expected[best])
    assert true[count] - true[best] <= errors_s + 1e-3 * expected[best] + 1e-6
