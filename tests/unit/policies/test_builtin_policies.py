"""Tests of the built-in policies round_robin, least_loaded and prefix_aware, rule by rule."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest

from policies import policy_registry
from policies.builtin_policies import LeastLoaded
from policies.endpoint_load import EndpointLoad
from policies.filters import available, prefer_proven, untried
from policies.routing_algorithm import pick, rejecting_filter
from policies.routing_types import Candidate
from tests.unit.policies.builders import ask, candidate


def chosen(policy: str, candidates: list[Candidate], seed: int = 1, **question: object) -> str:
    picked = pick(policy_registry.build(policy, {}), ask(seed=seed, **question), candidates)  # type: ignore[arg-type]
    assert picked is not None
    return picked.candidate.endpoint.name


def test_round_robin_is_exact_to_one_over_a_thousand_requests() -> None:
    policy, candidates = (
        policy_registry.build("round_robin", {}),
        [candidate(slot) for slot in range(7)],
    )
    rng_of_each = [ask(seed=number) for number in range(1000)]
    counts = Counter(
        pick(policy, question, candidates).candidate.endpoint.name for question in rng_of_each
    )  # type: ignore[union-attr]
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == 7


def test_round_robin_stays_even_among_those_present_while_one_comes_and_goes() -> None:
    policy, candidates = (
        policy_registry.build("round_robin", {}),
        [candidate(slot) for slot in range(4)],
    )
    counts: Counter[int] = Counter()
    for number in range(1000):
        candidates[3].load.is_available = number % 3 == 0
        counts[pick(policy, ask(seed=number), candidates).candidate.load.slot] += 1  # type: ignore[union-attr]
    assert max(counts[slot] for slot in range(3)) - min(counts[slot] for slot in range(3)) <= 2


def test_round_robin_starts_anywhere() -> None:
    assert (
        len(
            {
                chosen("round_robin", [candidate(slot) for slot in range(4)], seed)
                for seed in range(30)
            }
        )
        == 4
    )


def test_least_loaded_prefers_fewer_outstanding_tokens() -> None:
    assert (
        chosen(
            "least_loaded", [candidate(0, prefill_tokens=5000), candidate(1, expected_tokens=4000)]
        )
        == "tp1"
    )


def test_least_loaded_counts_requests_when_tokens_are_equal() -> None:
    assert chosen("least_loaded", [candidate(0, in_flight=3), candidate(1, in_flight=2)]) == "tp1"


def test_least_loaded_counts_external_requests_of_a_fresh_scrape_only() -> None:
    crowded = {"external_requests": 10, "in_flight": 2}
    mine = candidate(1, in_flight=4)
    assert chosen("least_loaded", [candidate(0, scraped_at=98.0, **crowded), mine]) == "tp1"
    assert chosen("least_loaded", [candidate(0, scraped_at=90.0, **crowded), mine]) == "tp0"
    assert chosen("least_loaded", [candidate(0, scraped_at=None, **crowded), mine]) == "tp0"


def test_own_requests_in_a_scrape_are_not_counted_twice() -> None:
    scraped = candidate(0, in_flight=3, running=3, waiting=0, scraped_at=99.0)
    assert chosen("least_loaded", [scraped, candidate(1, in_flight=4)]) == "tp0"


def test_own_requests_that_ended_since_the_scrape_are_not_external() -> None:
    scraped = candidate(0, in_flight=3, running=20, waiting=5, scraped_at=99.5)
    assert chosen("least_loaded", [scraped, candidate(1, in_flight=4)]) == "tp0"


def test_a_retry_goes_over_a_cap_rather_than_nowhere() -> None:
    full = [candidate(0), candidate(1, cap=2, in_flight=2)]
    policy = policy_registry.build("least_loaded", {})
    assert pick(policy, ask(tried=["tp0"]), full).candidate.endpoint.name == "tp1"  # type: ignore[union-attr]


def test_least_loaded_keeps_groups_even_with_sizes_that_vary_hundredfold() -> None:
    # Work arrives at 80 % of the speed of four simulated engines.
    #
    # Each serves its requests concurrently, at a fixed total rate of tokens.
    policy, candidates = (
        policy_registry.build("least_loaded", {}),
        [candidate(slot) for slot in range(4)],
    )
    rng, served, ends, now = Random(5), [0] * 4, list[tuple[float, int, int]](), 0.0
    for _ in range(3000):
        now += rng.expovariate(0.8 * 4 / 2030)
        while ends and ends[0][0] <= now:
            _, slot, tokens = heappop(ends)
            candidates[slot].load.prefill_tokens -= tokens
            candidates[slot].load.in_flight -= 1
        tokens = int(10 ** rng.uniform(2, 4))
        load: EndpointLoad = pick(policy, ask(tokens, 0), candidates).candidate.load  # type: ignore[union-attr]
        load.prefill_tokens += tokens
        load.in_flight += 1
        served[load.slot] += tokens
        heappush(ends, (now + load.prefill_tokens, load.slot, tokens))
    assert max(served) / min(served) <= 1.3


def test_ties_are_broken_at_random() -> None:
    for policy in ("least_loaded", "prefix_aware"):
        assert (
            len(
                {chosen(policy, [candidate(slot) for slot in range(4)], seed) for seed in range(40)}
            )
            == 4
        )


def test_prefix_aware_follows_the_cache_when_queues_are_even() -> None:
    candidates = [candidate(slot, prefill_tokens=500, in_flight=2) for slot in range(3)]
    assert chosen("prefix_aware", candidates, cached=[0, 800, 100]) == "tp1"


def test_prefix_aware_leaves_a_queue_that_costs_more_than_the_prefix_saves() -> None:
    idle = candidate(0)
    assert (
        chosen("prefix_aware", [idle, candidate(1, prefill_tokens=900)], cached=[0, 800]) == "tp0"
    )
    assert (
        chosen("prefix_aware", [idle, candidate(1, prefill_tokens=700)], cached=[0, 800]) == "tp1"
    )


def test_prefix_aware_waits_longer_for_a_prefix_where_a_wasted_prefill_would_slow_many() -> None:
    busy = candidate(0, in_flight=10)
    assert (
        chosen(
            "prefix_aware", [busy, candidate(1, prefill_tokens=3000, in_flight=10)], cached=[0, 800]
        )
        == "tp1"
    )


def test_patience_for_a_cached_prefix_is_bounded() -> None:
    crowd = {"in_flight": 50}
    hot = candidate(1, prefill_tokens=65_536 + 20_001, **crowd)
    assert (
        chosen(
            "prefix_aware", [candidate(0, **crowd), hot], prompt_tokens=20_000, cached=[0, 20_000]
        )
        == "tp0"
    )


def test_prefix_aware_shuns_an_engine_whose_memory_is_full() -> None:
    full = candidate(0, kv_usage=1.0, running=0, waiting=0, scraped_at=99.0)
    assert chosen("prefix_aware", [full, candidate(1, prefill_tokens=500)]) == "tp1"
    stale = candidate(0, kv_usage=1.0, scraped_at=10.0)
    assert chosen("prefix_aware", [stale, candidate(1, prefill_tokens=500)]) == "tp0"


def test_a_pick_records_candidates_and_scores() -> None:
    picked = pick(
        policy_registry.build("prefix_aware", {}),
        ask(cached=[0, 600]),
        [candidate(0), candidate(1)],
    )
    assert picked is not None
    assert (picked.cached_tokens, picked.candidate_count, picked.reason, picked.score) == (
        600,
        2,
        "prefix_aware",
        -400.0,
    )


@pytest.mark.parametrize(
    ("candidates", "tried", "reason"),
    [
        ([], (), "no_candidates"),
        ([candidate(0, is_available=False)], (), "available"),
        ([candidate(0), candidate(1, is_available=False)], ("tp0",), "untried"),
        ([candidate(0, cap=2, in_flight=2)], (), "below_cap"),
    ],
)
def test_a_refusal_names_the_filter_that_removed_the_last_candidate(
    candidates: list[Candidate], tried: tuple[str, ...], reason: str
) -> None:
    policy, question = policy_registry.build("least_loaded", {}), ask(tried=tried)
    assert pick(policy, question, candidates) is None
    assert rejecting_filter(policy, question, candidates) == reason


def test_rejecting_filter_raises_if_a_candidate_passes() -> None:
    with pytest.raises(ValueError, match="keep a candidate"):
        rejecting_filter(policy_registry.build("least_loaded", {}), ask(), [candidate(0)])


def test_a_retry_goes_to_an_endpoint_with_a_success_since_its_last_failure() -> None:
    candidates = [candidate(slot) for slot in range(4)]
    for item in candidates[:3]:
        item.load.is_proven = False
    assert len(prefer_proven(ask(), candidates)) == 4, "a first try goes anywhere"
    policy = LeastLoaded().build()
    assert [*policy.filters][:2] == [available, untried]
    assert not {untried, prefer_proven}.intersection(policy.first_attempt_filters), (
        "and they are not asked then"
    )
    assert set(policy.filters) - {untried, prefer_proven} == set(policy.first_attempt_filters)
    retried = ask(tried=("tp0",))
    assert prefer_proven(retried, candidates) == [candidates[3]]
    assert prefer_proven(retried, candidates[:3]) == candidates[:3], "none has had one"
