"""Tests of routing rules that other projects have published, at their thresholds."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from policies import policy_registry
from policies.engine.step_time import SpeedBelief, StepCosts
from policies.policy_types import Policy
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, Request, RoutingQuery, Slo
from tests.unit.policies.builders import ask, candidate

PRINTS = Fingerprinter(b"sixteen bytes at least")
# A token takes 0.1 ms at any context: 10,000 tokens are a second.
SHAPE = StepCosts(0.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0, request_s=0.0)
PACE = {
    "belief": SpeedBelief(SHAPE),
    "prefill_s_per_token": 1e-4,
    "attention_s_per_pair": 0.0,
    "fixed_ttft_s": 0.0,
    "decode_s_per_token": 0.02,
    "decode_s_per_sequence": 0.0,
    "decode_s_per_context_token": 0.0,
}


def chosen(
    policy: Policy | str, candidates: list[Candidate], seed: int = 1, **question: object
) -> str:
    return answer(policy, ask(seed=seed, **question), candidates)  # type: ignore[arg-type]


def answer(policy: str | Policy, question: RoutingQuery, fleet: list[Candidate]) -> str:
    value = policy_registry.build(policy, {}) if isinstance(policy, str) else policy
    picked = pick(value, question, fleet)
    assert picked is not None
    return picked.candidate.endpoint.name


def choices(
    policy: str, candidates: list[Candidate], times: int = 60, **question: object
) -> set[str]:
    return {chosen(policy, candidates, seed, **question) for seed in range(times)}

    # Power of two


def test_power_of_two_never_takes_the_fullest_and_not_always_the_emptiest() -> None:
    fleet = [candidate(0, in_flight=9), candidate(1, in_flight=5), candidate(2, in_flight=0)]
    assert choices("power_of_two", fleet) == {"tp1", "tp2"}


def test_power_of_two_counts_external_requests_of_a_fresh_scrape() -> None:
    fleet = [candidate(0, external_requests=3, scraped_at=98.0), candidate(1, in_flight=2)]
    assert choices("power_of_two", fleet) == {"tp1"}
    fleet[0].load.scraped_at = 90.0
    assert choices("power_of_two", fleet) == {"tp0"}

    # SGLang


def test_sglang_follows_the_longest_prefix_above_its_share_of_the_prompt() -> None:
    fleet = [
        candidate(0, prefix_cache_tokens=10.0),
        candidate(1, in_flight=60, prefix_cache_tokens=9e5),
    ]
    assert chosen("sglang_cache_aware", fleet, cached=[0, 301]) == "tp1"
    assert chosen("sglang_cache_aware", fleet, cached=[0, 300]) == "tp0"


def test_sglang_levels_loads_that_are_far_apart_by_both_measures() -> None:
    fleet, warm = [candidate(0, in_flight=35), candidate(1, in_flight=100)], [0, 1000]
    # The loads differ by 65, and by a factor of 2.9.
    assert chosen("sglang_cache_aware", fleet, cached=warm) == "tp0"
    fleet[1].load.in_flight = 99
    assert chosen("sglang_cache_aware", fleet, cached=warm) == "tp1"  # 64 apart
    fleet[0].load.in_flight, fleet[1].load.in_flight = 200, 300
    assert chosen("sglang_cache_aware", fleet, cached=warm) == "tp1"  # 100 apart, but 1.5 times


def test_sglang_sends_cold_prompts_to_the_smallest_tree() -> None:
    fleet = [
        candidate(0, prefix_cache_tokens=500.0),
        candidate(1, in_flight=20, prefix_cache_tokens=400.0),
    ]
    assert chosen("sglang_cache_aware", fleet) == "tp1"


def test_sglang_breaks_a_tie_of_prefixes_by_load_then_by_tree() -> None:
    fleet = [
        candidate(0, in_flight=3),
        candidate(1, prefix_cache_tokens=9.0),
        candidate(2, prefix_cache_tokens=8.0),
    ]
    assert choices("sglang_cache_aware", fleet, cached=[900, 900, 900]) == {"tp2"}

    # Dynamo


def test_dynamo_trades_a_cached_block_for_a_block_in_use() -> None:
    fleet = [candidate(0), candidate(1, decode_tokens=799)]
    assert chosen("dynamo_kv", fleet, cached=[0, 800]) == "tp1"
    fleet[1].load.decode_tokens = 801
    assert chosen("dynamo_kv", fleet, cached=[0, 800]) == "tp0"


def test_dynamo_counts_a_queued_prefill_as_work_and_as_memory() -> None:
    fleet = [candidate(0, prefill_tokens=500), candidate(1, decode_tokens=900)]
    assert chosen("dynamo_kv", fleet) == "tp1"
    assert chosen(policy_registry.build("dynamo_kv", {"prefill_load_scale": 0.5}), fleet) == "tp0"


def test_dynamo_gives_no_credit_beyond_what_is_to_be_prefilled() -> None:
    policy = policy_registry.build("dynamo_kv", {"overlap_score_credit": 5.0})
    fleet = [candidate(0), candidate(1, decode_tokens=1)]
    assert chosen(policy, fleet, cached=[200, 1000]) == "tp0"


def test_dynamo_fades_the_credit_of_a_longer_queue() -> None:
    fleet = [candidate(0), candidate(1, prefill_tokens=400)]
    assert chosen("dynamo_kv", fleet, cached=[0, 1000]) == "tp1"
    assert (
        chosen(
            policy_registry.build("dynamo_kv", {"overlap_score_credit_decay": 8.0}),
            fleet,
            cached=[0, 1000],
        )
        == "tp0"
    )


def test_dynamo_draws_at_a_temperature_and_prefers_the_cheaper() -> None:
    policy = policy_registry.build("dynamo_kv", {"router_temperature": 0.5})
    fleet = [candidate(0), candidate(1, decode_tokens=500), candidate(2, decode_tokens=1000)]
    drawn = Counter(chosen(policy, fleet, seed) for seed in range(600))
    assert drawn["tp0"] > drawn["tp1"] > drawn["tp2"] > 0
    # expected ratio: e to the minus two
    assert drawn["tp2"] / drawn["tp0"] == pytest.approx(0.135, abs=0.06)
    assert choices("dynamo_kv", fleet) == {"tp0"}

    # llm-d's blend


def test_llmd_blend_gives_a_whole_hit_more_than_an_empty_queue() -> None:
    fleet = [candidate(0), candidate(1, in_flight=5)]
    # The prefix scores 3, and the shorter queue 2.
    assert chosen("llmd_blend", fleet, cached=[0, 1000]) == "tp1"
    assert chosen("llmd_blend", fleet, cached=[0, 600]) == "tp0"  # 1.8


def test_llmd_blend_weighs_free_memory_as_much_as_the_queue() -> None:
    full = candidate(1, kv_usage=0.9, scraped_at=99.0)
    assert chosen("llmd_blend", [candidate(0), full], cached=[0, 599]) == "tp0"
    assert chosen("llmd_blend", [candidate(0), full], cached=[0, 601]) == "tp1"
    full.load.scraped_at = 90.0
    assert chosen("llmd_blend", [candidate(0), full], cached=[0, 1]) == "tp1"
    booked = candidate(1, kv_tokens=1000.0, kv_reserved=900)
    assert chosen("llmd_blend", [candidate(0), booked], cached=[0, 599]) == "tp0"


def test_llmd_blend_distributes_cold_prompts_in_turn() -> None:
    policy, fleet = policy_registry.build("llmd_blend", {}), [candidate(slot) for slot in range(4)]
    took = [chosen(policy, fleet, seed) for seed in range(8)]
    assert len(set(took[:4])) == 4
    assert took[4:] == took[:4]


def test_llmd_blend_takes_no_turn_for_a_cached_prompt() -> None:
    policy, fleet = policy_registry.build("llmd_blend", {}), [candidate(slot) for slot in range(2)]
    first = chosen(policy, fleet)
    for seed in range(5):
        assert chosen(policy, fleet, seed, cached=[900, 0]) == "tp0"
    assert chosen(policy, fleet) != first

    # llm-d's token-aware router


def test_llmd_token_stays_with_the_warm_until_their_queue_is_eighteen_seconds_longer() -> None:
    cold, warm = candidate(0, **PACE), candidate(1, prefill_tokens=179_000, **PACE)
    assert chosen("llmd_token", [cold, warm], cached=[0, 800]) == "tp1"
    warm.load.prefill_tokens = 181_000
    assert chosen("llmd_token", [cold, warm], cached=[0, 800]) == "tp0"
    fast = policy_registry.build("llmd_token", {"peak_tokens_per_s": 20_000.0})
    assert chosen(fast, [cold, warm], cached=[0, 800]) == "tp1"


def test_llmd_token_needs_four_fifths_of_the_prompt_to_be_warm() -> None:
    fleet = [candidate(0, **PACE), candidate(1, prefill_tokens=1000, **PACE)]
    assert chosen("llmd_token", fleet, cached=[0, 799]) == "tp0"
    assert chosen("llmd_token", fleet, cached=[0, 800]) == "tp1"


def test_llmd_token_takes_the_fewest_tokens_or_the_fewest_requests() -> None:
    fleet = [
        candidate(0, prefill_tokens=100, in_flight=9),
        candidate(1, prefill_tokens=5000, in_flight=1),
    ]
    assert chosen("llmd_token", fleet) == "tp0"
    assert chosen(policy_registry.build("llmd_token", {"bound": "decode"}), fleet) == "tp1"

    # llm-d's predictor


def asked(
    slo: Slo | None = None, id: str = "an id", cached: tuple[int, ...] = (), seed: int = 1
) -> RoutingQuery:
    request = Request(id, "model", "tenant", 1000, 100)
    if slo is not None:
        request = msgspec.structs.replace(request, slo=slo)
    return RoutingQuery(request, 100.0, Random(seed), cached)


def test_llmd_predictor_breaks_with_the_warm_beyond_five_seconds() -> None:
    cold, warm = candidate(0, **PACE), candidate(1, prefill_done_at=104.9, **PACE)
    assert answer("llmd_predictor", asked(cached=(0, 900)), [cold, warm]) == "tp1"
    warm.load.prefill_done_at = 105.2  # TTFT 5.2 + 0.01 s here, and 0.1 s at the other endpoint
    assert answer("llmd_predictor", asked(cached=(0, 900)), [cold, warm]) == "tp0"


def test_llmd_predictor_lets_one_request_in_a_hundred_explore() -> None:
    fleet = [candidate(0, **PACE), candidate(1, prefill_done_at=103.0, **PACE)]
    policy = policy_registry.build("llmd_predictor", {})
    took = Counter(
        answer(policy, asked(id=f"request-{n}", cached=(0, 900)), fleet) for n in range(3000)
    )
    assert 10 <= took["tp0"] <= 60


def test_llmd_predictor_weighs_the_first_token_four_times_the_others() -> None:
    slow_start, slow_steps = candidate(0, prefill_done_at=101.0, **PACE), candidate(1, **PACE)
    slow_steps.load.decode_s_per_token = 0.2
    assert answer("llmd_predictor", asked(), [slow_start, slow_steps]) == "tp1"
    even = policy_registry.build("llmd_predictor", {"ttft_weight": 0.2, "tpot_weight": 0.8})
    assert answer(even, asked(), [slow_start, slow_steps]) == "tp0"


def test_llmd_predictor_fills_up_the_fullest_that_keeps_the_slo() -> None:
    fleet = [
        candidate(0, **PACE),
        candidate(1, prefill_done_at=101.5, **PACE),
        candidate(2, prefill_done_at=103.0, **PACE),
    ]
    assert answer("llmd_predictor", asked(Slo("chat", 2.0, 0.1)), fleet) == "tp1"
    assert answer("llmd_predictor", asked(), fleet) == "tp0"


def test_llmd_predictor_prefers_a_high_tpot_to_a_late_start_when_no_endpoint_meets_the_slo() -> (
    None
):
    late, slow, both = (
        candidate(0, prefill_done_at=103.0, **PACE),
        candidate(1, **PACE),
        candidate(2, **PACE),
    )
    slow.load.decode_s_per_token = both.load.decode_s_per_token = 0.5
    both.load.prefill_done_at = 103.0
    assert answer("llmd_predictor", asked(Slo("chat", 2.0, 0.1)), [late, slow, both]) == "tp1"
    assert answer("llmd_predictor", asked(Slo("chat", 2.0, 0.1)), [late, both]) == "tp0"

    # Preble


def test_preble_exploits_a_prefix_longer_than_the_rest_of_the_prompt() -> None:
    fleet = [candidate(0, **PACE), candidate(1, **PACE)]
    policy = policy_registry.build("preble", {})
    for number in range(5):
        assert answer(policy, asked(id=f"{number}", cached=(0, 501)), fleet) == "tp1"
        # By the end of the loop, tp1 has received much work.
    assert answer(policy, asked(id="half", cached=(0, 500)), fleet) == "tp0"


def test_preble_explores_by_what_was_given_in_the_last_three_minutes() -> None:
    policy, fleet = (
        policy_registry.build("preble", {}),
        [candidate(0, **PACE), candidate(1, **PACE)],
    )
    big = Request("big", "model", "tenant", 50_000, 0)
    first = answer(policy, RoutingQuery(big, 100.0, Random(1)), fleet)
    other = {"tp0": "tp1", "tp1": "tp0"}[first]
    for number in range(10):
        request = Request(f"{number}", "model", "tenant", 1000, 0)
        assert answer(policy, RoutingQuery(request, 101.0, Random(number)), fleet) == other
    small = Request("later", "model", "tenant", 1000, 0)
    assert (
        answer(policy, RoutingQuery(small, 280.5, Random(1)), fleet) == first
    )  # the large request was sent 180.5 s ago, the small one 179.5 s ago


def test_preble_counts_what_a_prefill_would_evict_by_how_often_it_is_hit() -> None:
    policy, fleet = (
        policy_registry.build("preble", {}),
        [candidate(0, **PACE), candidate(1, **PACE)],
    )
    for number in range(20):  # both endpoints get equal loads, and every prompt is cached
        slot = number % 2
        warm = tuple(1000 if index == slot else 0 for index in range(2))
        assert answer(policy, asked(id=f"{number}", cached=warm), fleet) == f"tp{slot}"
    fleet[0].load.kv_tokens, fleet[0].load.prefix_cache_tokens = 10_000.0, 9_900.0
    assert {answer(policy, asked(id="same", seed=seed), fleet) for seed in range(20)} == {"tp1"}


def test_preble_turns_from_the_heaviest_to_the_lightest_when_they_are_far_apart() -> None:
    policy, fleet = (
        policy_registry.build("preble", {}),
        [candidate(0, **PACE), candidate(1, **PACE)],
    )
    took = [answer(policy, asked(id=f"{number}", cached=(1000, 0)), fleet) for number in range(60)]
    assert set(took[:50]) == {"tp0"}
    assert "tp1" in took[50:]


def test_preble_counts_a_request_as_much_at_a_busy_endpoint_as_at_an_idle_one() -> None:
    # If requests that share a step counted less, the busiest endpoint would get ever more.
    policy, fleet = (
        policy_registry.build("preble", {}),
        [candidate(0, decoding=40, **PACE), candidate(1, **PACE)],
    )
    requests = [Request(f"{number}", "model", "tenant", 1000, 500) for number in range(20)]
    took = Counter(
        answer(policy, RoutingQuery(request, 100.0, Random(1)), fleet) for request in requests
    )
    assert took == {"tp0": 10, "tp1": 10}


def test_preble_moves_a_request_that_is_picked_again() -> None:
    policy, fleet = (
        policy_registry.build("preble", {}),
        [candidate(0, **PACE), candidate(1, **PACE)],
    )
    for _ in range(40):
        assert answer(policy, asked(cached=(0, 900)), fleet) == "tp1"
    other = Request("other", "model", "tenant", 1000, 1000)
    assert answer(policy, RoutingQuery(other, 100.0, Random(1), (900, 0)), fleet) == "tp0"
    assert (
        answer(
            policy,
            RoutingQuery(Request("third", "model", "tenant", 1000, 1), 100.0, Random(1)),
            fleet,
        )
        == "tp1"
    )

    # Mooncake, LMetric, Llumnix


def test_mooncake_waits_for_a_prefix_as_long_as_computing_it_takes_and_no_longer() -> None:
    fleet = [
        candidate(0, **PACE),
        candidate(1, prefill_done_at=100.079, prefill_tokens=99_999, **PACE),
    ]
    assert chosen("mooncake", fleet, cached=[0, 800]) == "tp1"
    fleet[1].load.prefill_done_at = 100.081
    assert chosen("mooncake", fleet, cached=[0, 800]) == "tp0"


def test_mooncake_knows_slow_endpoints_where_token_counters_do_not() -> None:
    slow, fast = (
        candidate(0, **PACE),
        candidate(1, prefill_tokens=2000, prefill_done_at=100.1, **PACE),
    )
    slow.load.belief = SpeedBelief(msgspec.structs.replace(SHAPE, token_s=1e-3))
    assert chosen("mooncake", [slow, fast]) == "tp1"
    assert chosen("llmd_token", [slow, fast]) == "tp0"


def test_predictors_made_offline_ignore_what_was_learnt_of_one_of_equals() -> None:
    fleet = [candidate(0, **PACE), candidate(1, **PACE)]
    fleet[1].load.prefill_s_per_token = 0.9e-4
    for policy in ("mooncake", "llmd_predictor", "dualmap"):
        assert choices(policy, fleet) == {"tp0", "tp1"}


def test_lmetric_multiplies_what_llumnix_adds() -> None:
    few_long = candidate(0, prefill_tokens=2000, in_flight=1, prefill_done_at=100.2, **PACE)
    many_short = candidate(1, in_flight=9, **PACE)
    # prompt tokens x requests: 3000 x 2 against 1000 x 10
    assert chosen("lmetric", [few_long, many_short]) == "tp0"
    assert chosen("llumnix", [few_long, many_short]) == "tp1"


def test_llumnix_breaks_a_tie_by_the_work_in_generation() -> None:
    fleet = [candidate(0, decode_tokens=900), candidate(1, decode_tokens=100, expected_tokens=100)]
    assert choices("llumnix", fleet) == {"tp1"}


def test_llumnix_counts_what_is_left_of_a_queue_by_now() -> None:
    fleet = [
        candidate(0, prefill_tokens=5000, prefill_done_at=100.05, **PACE),
        candidate(1, prefill_tokens=1000, **PACE),
    ]
    fleet[1].load.prefill_done_at = 100.1
    assert chosen("llumnix", fleet) == "tp0"  # only 500 of its 5000 tokens are left to compute

    # DualMap


def prompt(number: int, blocks: int = 4, system: int = 0) -> Fingerprint:
    common, own = (
        Random(0).randbytes(system * PRINTS.block_bytes),
        Random(number + 1).randbytes((blocks - system) * PRINTS.block_bytes),
    )
    return PRINTS.fingerprint(b"salt", common + own)


def dual(
    policy: Policy,
    fleet: list[Candidate],
    prints: Fingerprint,
    cached: tuple[int, ...] = (),
    seed: int = 1,
) -> str:
    request = Request("id", "model", "tenant", 1000, 100, slo=Slo("chat", 2.0, 0.1))
    return answer(
        policy, RoutingQuery(request, 100.0, Random(seed), cached, frozenset(), prints), fleet
    )


def pair_of(policy: Policy, fleet: list[Candidate], prints: Fingerprint) -> list[int]:
    slots = []
    for _ in range(2):
        slots.append(int(dual(policy, fleet, prints)[2:]))
        fleet[slots[-1]].load.prefill_done_at = 150.0
    for slot in slots:
        fleet[slot].load.prefill_done_at = 0.0
    return slots


def test_dualmap_has_two_endpoints_for_a_prefix_and_keeps_them() -> None:
    fleet = [candidate(slot, **PACE) for slot in range(16)]
    for number in range(10):
        policy = policy_registry.build("dualmap", {})
        pair = pair_of(policy, fleet, prompt(number))
        assert len(set(pair)) == 2
        assert sorted(pair_of(policy, fleet, prompt(number))) == sorted(pair)
        gone = next(slot for slot in range(16) if slot not in pair)
        left = [item for item in fleet if item.load.slot != gone]
        assert dual(policy, left, prompt(number)) in {f"tp{slot}" for slot in pair}


def test_dualmap_takes_the_more_cached_unless_it_is_late_and_the_other_less_so() -> None:
    policy, fleet = (
        policy_registry.build("dualmap", {}),
        [candidate(slot, **PACE) for slot in range(8)],
    )
    prints = prompt(1)
    one, other = pair_of(policy, fleet, prints)
    cached = tuple(
        900 if slot == one else 1000 if slot not in (one, other) else 0 for slot in range(8)
    )
    fleet[one].load.prefill_done_at = 101.9
    assert dual(policy, fleet, prints, cached) == f"tp{one}"
    fleet[one].load.prefill_done_at = 102.1
    assert dual(policy, fleet, prints, cached) == f"tp{other}"
    fleet[other].load.prefill_done_at = 103.0
    assert dual(policy, fleet, prints, cached) == f"tp{one}"


def test_dualmap_spreads_prefixes_over_the_fleet() -> None:
    policy, fleet = (
        policy_registry.build("dualmap", {}),
        [candidate(slot, **PACE) for slot in range(8)],
    )
    took = Counter(dual(policy, fleet, prompt(number)) for number in range(400))
    assert len(took) == 8
    assert max(took.values()) / min(took.values()) < 2.5


def test_dualmap_hashes_past_a_common_system_prompt() -> None:
    policy, fleet = (
        policy_registry.build("dualmap", {}),
        [candidate(slot, **PACE) for slot in range(8)],
    )
    took = [dual(policy, fleet, prompt(number, blocks=6, system=2)) for number in range(200)]
    assert len(set(took[:20])) <= 2
    assert len(set(took[100:])) == 8


def test_dualmap_gives_a_prompt_too_short_to_hash_to_any_two() -> None:
    fleet = [candidate(slot, **PACE) for slot in range(4)]
    assert choices("dualmap", fleet) == {"tp0", "tp1", "tp2", "tp3"}


def test_llmd_predictor_takes_the_standard_class_of_a_configuration_for_no_slo() -> None:
    fleet = [
        candidate(0, prefill_done_at=100.5, **PACE),
        candidate(1, prefill_done_at=101.5, **PACE),
    ]
    configured = Slo("standard", 5.0, 0.1, 1.0)
    assert (
        answer("llmd_predictor", asked(), fleet)
        == answer("llmd_predictor", asked(configured), fleet)
        == "tp0"
    )
