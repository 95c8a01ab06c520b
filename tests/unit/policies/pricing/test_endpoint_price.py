"""Tests of the price of serving a request at an endpoint: each part, and their sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf, sqrt
from random import Random

import pytest
from msgspec.structs import replace

from policies import policy_registry
from policies.endpoint_load import join_ranks
from policies.engine.running_answer_lengths import AgeGroup
from policies.engine.step_time import PRIOR_VAR, SpeedFactor
from policies.policy_types import DECODE_PHASE, WHOLE_REQUEST, LinkLoad, PhaseShare
from policies.pricing.endpoint_price import PricedPolicy, PriceScorer, round_down
from policies.pricing.pool_speeds import PoolSpeeds
from policies.pricing.price_loop import PriceLoop, patience_s
from policies.pricing.speed_differences import equalize_speeds
from policies.pricing.usual_slo import MOST_VOTES
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, Request, RoutingQuery, Slo
from tests.unit.policies.builders import ask, outlook

PRICES = PriceScorer(PricedPolicy(measured_share=0.0))
IDLE_LINK = LinkLoad(0, 0.0, 0.0)


def term(question: RoutingQuery, one: Candidate, name: str) -> float:
    (parts,) = PRICES.terms(question, [one])
    return parts[name]


def levelled(factors: Sequence[float], unknown: Sequence[int] = ()) -> list[float]:
    # Return the speed factors of endpoints after equalization, as the price uses them.
    #
    # `unknown` has the indices of endpoints whose speed has not been observed.
    speeds = [
        SpeedFactor(factor, PRIOR_VAR if place in unknown else 0.0)
        for place, factor in enumerate(factors)
    ]
    return [
        factor * times for factor, times in zip(factors, equalize_speeds(speeds, 1.5), strict=True)
    ]


def test_the_parts_of_a_price_add_up_to_it() -> None:
    fleet = [
        outlook(
            slot,
            prefill_done_at=100.0 + slot,
            kv_reserved=90_000 * slot,
            expected_tokens=900 * slot,
        )
        for slot in range(5)
    ]
    question = ask(9000, 300, cached=[0, 4096, 0, 8192])
    explained: list[Mapping[str, float]] = list(PRICES.terms(question, fleet))
    for parts, price in zip(explained, PRICES.prices(question, fleet), strict=True):
        assert set(parts) == {"ttft", "tpot", "others", "work", "kv"}
        assert sum(parts.values()) == pytest.approx(price)


def test_a_prefill_at_a_rank_delays_the_answers_of_all_ranks_that_step_with_it() -> None:
    fleet = [outlook(0), outlook(1, answers=20, expected_tokens=2_000, in_flight=20)]
    question = ask(9000, 300)
    alone = term(question, fleet[0], "others")
    join_ranks([one.load for one in fleet])
    together = term(question, fleet[0], "others")
    assert alone == 0.0
    assert together > 0.5 * term(question, fleet[1], "others") > 0.0


def test_a_prefill_costs_other_ranks_less_while_one_of_them_computes_prompts_for_longer() -> None:
    answers = {"answers": 20, "expected_tokens": 4_000, "in_flight": 20}
    fleet = [outlook(0), outlook(1, **answers), outlook(2)]
    join_ranks([one.load for one in fleet])
    question = ask(9000, 300)
    free = term(question, fleet[0], "others")
    fleet[2].load.prefill_done_at = question.now + 1.0
    assert 0.0 < term(question, fleet[0], "others") < free


def test_engine_time_costs_more_where_prompts_keep_other_ranks_busy() -> None:
    stretched = outlook(1, decode_s_per_context_token=1e-6)
    fleet, question = [outlook(0), stretched], ask(9000, 300)
    alone = term(question, fleet[0], "work")
    join_ranks([one.load for one in fleet])
    assert term(question, fleet[0], "work") > alone
    assert PRICES.prices(question, fleet)[0] == pytest.approx(
        sum(PRICES.terms(question, fleet)[0].values())
    )


class CountedGroups(list[AgeGroup]):
    """The groups of an engine's running answers, with a count of how often a price reads them."""

    reads = 0

    def __iter__(self) -> Iterator[AgeGroup]:
        CountedGroups.reads += 1
        return super().__iter__()


def test_a_pick_among_many_ranks_reads_the_answers_of_all_only_for_the_cheapest() -> None:
    question, ranks = ask(9000, 300), 8
    answers = {"answers": 20, "expected_tokens": 4_000, "in_flight": 20}
    fleet = [outlook(slot, fixed_ttft_s=9.0 if slot else 0.0, **answers) for slot in range(ranks)]
    join_ranks([one.load for one in fleet])
    for one in fleet:
        timeline = one.load.timeline
        timeline.update_answers(one.load, question.now)
        timeline.answers.age_groups = CountedGroups(timeline.answers.age_groups)
        timeline.answers_due_at = inf
    scores, before = PRICES.scores(question, fleet), CountedGroups.reads
    assert max(scores) == scores[0]
    assert before <= 2 * ranks  # those of all ranks once; else 8 * 8
    assert max(scores) == pytest.approx(-PRICES.explain(question, fleet, 0).total)


def test_the_least_prefill_work_decides_between_ranks_and_the_price_between_engines() -> None:
    # The holder of the prefix has a longer queue, whose price alone would send the prompt away.
    waits = {"prefill_tokens": 6_000, "in_flight": 4, "prefill_done_at": 104.0}
    ranks = [outlook(0, **waits), outlook(1), outlook(2, in_flight=1)]
    question = ask(9000, 300, cached=[8192])
    assert cheapest(question, ranks) == 1
    join_ranks([one.load for one in ranks])
    assert cheapest(question, ranks) == 0
    assert cheapest(question, [*ranks, outlook(3)]) == 3
    assert cheapest(question, [*ranks, outlook(3, prefill_done_at=109.0)]) == 0


def cheapest(question: RoutingQuery, fleet: Sequence[Candidate]) -> int:
    scores = PRICES.scores(question, fleet)
    return scores.index(max(scores))


def test_what_compiled_prices_declare_as_doubles_are_floats() -> None:
    # Any other value raises a TypeError in the compiled module only.
    loop = PriceLoop(PricedPolicy())
    assert {type(getattr(loop, name)) for name in PriceLoop.__slots__} == {float}


def test_equalized_speeds_follow_each_observation_and_the_candidates_asked_for() -> None:
    by, fleet, question = (
        PriceScorer(PricedPolicy(measured_share=0.0)),
        [outlook(0), outlook(1)],
        ask(8000, 300),
    )
    fleet[1].load.belief.speeds = fleet[1].load.belief.speeds._replace(prefill=SpeedFactor(1.2, 0))
    speeds = PoolSpeeds(1.5, 0.0)
    assert speeds.factors(fleet)[0] == pytest.approx([1.2 / 1.0, 1.0])
    assert speeds.factors(fleet[:1])[0] == [1.0]
    assert speeds.factors(()) == ([], [], [])
    before = by.prices(question, fleet)
    assert by.prices(question, fleet) == before
    fleet[1].load.belief.observe_decode(4.0, 1.0, 0.5, 0.001)
    assert by.prices(question, fleet) != before
    assert by.prices(question, fleet) == PriceScorer(PricedPolicy(measured_share=0.0)).prices(
        question, fleet
    )


def test_slowdown_is_spread_over_the_slowed_answer() -> None:
    busy = outlook(0, answers=10, expected_tokens=10_000)
    assert term(ask(9000, 50), busy, "others") == pytest.approx(
        term(ask(9000, 1000), busy, "others")
    )
    short = outlook(0, answers=10, expected_tokens=1000)
    assert term(ask(9000, 50), short, "others") > 5 * term(ask(9000, 50), busy, "others")


def test_prompts_computed_for_other_endpoints_have_nothing_to_lose_where_they_are_computed() -> (
    None
):
    alone = outlook(0, in_flight=1, answers=1, expected_tokens=350)
    beside_ten = outlook(1, in_flight=11, answers=1, expected_tokens=360)
    harm = [term(ask(9000, 350), item, "others") for item in (alone, beside_ten)]
    assert 0.0 < harm[1] == pytest.approx(harm[0], rel=0.05)


def test_a_wait_for_kv_delays_only_the_own_first_token() -> None:
    question = ask(8000, 300)
    roomy, full = (
        outlook(0, answers=20, expected_tokens=7000, free_kv_tokens=free, s_per_freed_kv_token=5e-4)
        for free in (9000.0, 4000.0)
    )
    assert term(question, full, "ttft") > 10 * term(question, roomy, "ttft")
    assert term(question, full, "others") == term(question, roomy, "others")
    behind = outlook(1, free_kv_tokens=4000.0, s_per_freed_kv_token=5e-4, prefill_done_at=103.0)
    assert term(question, behind, "ttft") == term(
        question, outlook(2, prefill_done_at=103.0), "ttft"
    )


def test_a_queue_delays_the_own_first_token_and_running_answers() -> None:
    question, idle, queue = (
        ask(4000, 300),
        outlook(0, answers=20, expected_tokens=7000),
        outlook(1, answers=20, expected_tokens=7000, prefill_done_at=103.0),
    )
    assert term(question, queue, "ttft") > 10 * term(question, idle, "ttft")
    assert term(question, queue, "others") > term(question, idle, "others")
    assert term(question, queue, "work") > 5 * term(question, idle, "work")


def test_a_first_token_at_its_budget_costs_one_request() -> None:
    question = ask(1000, 100)
    at_budget = outlook(
        0, fixed_ttft_s=0.0, prefill_s_per_token=5.0 / 1000, attention_s_per_pair=0.0
    )
    assert term(question, at_budget, "ttft") == pytest.approx(1.0)


def test_a_request_that_is_lost_anyway_loses_little_more_by_waiting() -> None:
    question = ask(1000, 100)
    steps = [
        term(question, outlook(0, prefill_done_at=100.0 + 5.0 * waits), "ttft")
        for waits in (1, 2, 3)
    ]
    assert 0.0 < steps[2] - steps[1] == pytest.approx(PricedPolicy().overdue)
    assert steps[1] - steps[0] > steps[2] - steps[1]


def test_a_prefix_cached_elsewhere_makes_prefill_here_redundant() -> None:
    question = ask(20_000, 300, cached=[0, 16_384])
    cold, warm = outlook(0), outlook(1)
    assert term(question, warm, "work") < 0.3 * term(question, cold, "work")
    assert PRICES.scores(question, [cold, warm])[1] > PRICES.scores(question, [cold, warm])[0]


def test_an_endpoint_with_eviction_regret_costs_more_to_fill() -> None:
    question, calm, thrashing = ask(20_000, 300), outlook(0), outlook(1, eviction_regret=0.5)
    regret = term(question, thrashing, "work") - term(question, calm, "work")
    half = term(question, outlook(1, eviction_regret=0.25), "work") - term(question, calm, "work")
    assert regret == pytest.approx(2.0 * half)
    assert regret > term(question, calm, "work")


def test_a_prefill_costs_what_the_next_request_in_the_queue_loses_by_it() -> None:
    question = ask(1000, 100)
    busy = {"fixed_ttft_s": 0.0, "prefill_s_per_token": 1.0 / 1000, "attention_s_per_pair": 0.0}
    for queue_s, share in ((0.0, 0.0), (2.0, 0.4)):  # of the budget of 5 s
        here = outlook(0, prefill_done_at=100.0 + queue_s, **busy)
        lost = (share + 0.2) ** 3 - share**3
        assert term(question, here, "work") == pytest.approx(lost)


def test_engine_time_costs_more_where_prompts_keep_the_engine_busy() -> None:
    question, idle = ask(1000, 100), outlook(0)
    busy = outlook(0, decode_s_per_context_token=2 * idle.load.belief.context_s)
    own = term(question, idle, "work") ** (1 / 3)  # the prefill as a share of the TTFT budget
    more = term(question, busy, "work") - term(question, idle, "work")
    assert more == pytest.approx(0.5 * own)


def test_a_queue_in_which_all_are_late_makes_no_prefill_cheap() -> None:
    question = ask(1000, 100)
    work = [
        term(question, outlook(0, prefill_done_at=100.0 + queue_s), "work")
        for queue_s in (2.0, 6.0, 10.0, 60.0)
    ]
    assert work == sorted(work)


def test_a_burst_after_one_prefix_spreads_over_idle_endpoints() -> None:
    # Computing the prefix again takes a third of the TTFT budget. Waiting at the only endpoint that
    # has it cached takes half of the budget.
    question = ask(4000, 50, cached=[3900, 0])
    holder = outlook(0, prefill_done_at=102.5, prefill_s_per_token=4e-4, attention_s_per_pair=0.0)
    idle = outlook(1, prefill_s_per_token=4e-4, attention_s_per_pair=0.0)
    scores = PRICES.scores(question, [holder, idle])
    assert scores[1] > scores[0]


def test_a_full_memory_repels_more_than_a_long_way_to_the_next_free_one() -> None:
    question = ask(8000, 300)
    full, free = (
        outlook(0, kv_used_tokens=1_200_000, answers=100, expected_tokens=35_000),
        outlook(
            1, kv_used_tokens=60_000, answers=100, expected_tokens=35_000, prefill_done_at=100.5
        ),
    )
    assert term(question, full, "kv") > term(question, free, "kv")
    assert PRICES.scores(question, [full, free])[1] > PRICES.scores(question, [full, free])[0]


def test_a_prefix_that_many_sequences_share_does_not_fill_the_memory() -> None:
    question = ask(8000, 300)
    shared, apart = (
        outlook(0, kv_reserved=900_000, kv_used_tokens=60_000, answers=100),
        outlook(1, kv_reserved=900_000, kv_used_tokens=900_000, answers=100),
    )
    assert term(question, shared, "kv") < 0.01 * term(question, apart, "kv")


def test_an_endpoint_without_a_free_slot_repels_even_if_its_memory_is_free() -> None:
    question = ask(500, 2000)
    busy = {"answers": 128, "expected_tokens": 256_000, "decode_s_per_token": 0.02}
    full = outlook(0, slots=128, in_flight=128, **busy)
    roomy = outlook(1, slots=128, in_flight=90, **busy)
    assert PRICES.scores(question, [full, roomy])[1] > PRICES.scores(question, [full, roomy])[0]
    assert term(question, full, "ttft") > term(question, roomy, "ttft")


def test_slots_that_one_endpoint_has_shown_are_expected_of_the_others() -> None:
    question = ask(500, 2000)
    shown, unknown = outlook(0, slots=64, in_flight=10), outlook(1, in_flight=63)
    apart = -PRICES.scores(question, [unknown])[0]
    beside = -PRICES.scores(question, [shown, unknown])[1]
    assert beside > apart + 0.1


def test_a_first_token_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    question = ask(500, 300)
    due, overdue = (
        outlook(0, prefill_done_at=100.0, next_first_token_at=100.0),
        outlook(1, prefill_done_at=97.0, next_first_token_at=97.0),
    )
    assert term(question, overdue, "ttft") > term(question, due, "ttft")


def test_a_scrape_counts_external_requests_only_while_fresh() -> None:
    question = ask(4000, 300)
    load = {"external_requests": 5, "waiting": 3, "kv_usage": 0.9}
    alone, old, fresh = (
        outlook(0),
        outlook(1, scraped_at=90.0, **load),
        outlook(2, scraped_at=99.0, **load),
    )
    prices = PRICES.prices(question, [alone, old, fresh])
    assert prices[0] == prices[1] < prices[2]


def test_running_answers_do_not_feel_the_assumed_queue_of_external_requests() -> None:
    load = {"scraped_at": 99.0, "answers": 4, "expected_tokens": 1200}
    alone = outlook(0, **load)
    with_others = outlook(0, external_requests=5, waiting=3, **load)
    question = ask(4000, 300)
    assert term(question, alone, "others") == term(question, with_others, "others")
    assert term(question, alone, "ttft") < term(question, with_others, "ttft")


def test_time_spent_waiting_at_the_gateway_is_gone_from_the_budget() -> None:
    request = Request(
        "id", "model", "tenant", 4000, 300, slo=Slo("tight", 2.0, 0.1), arrived_s=10.0
    )
    assert patience_s(request, 10.0) == 2.0
    assert patience_s(request, 11.5) == pytest.approx(0.5)
    assert patience_s(request, 99.0) == pytest.approx(0.1)


def test_similar_speeds_count_as_equal_and_slow_ones_do_not() -> None:
    assert levelled([1.0, 1.2, 0.9]) == pytest.approx([1.0, 1.0, 1.0])
    assert levelled([1.0, 1.0, 4.0]) == pytest.approx([1.0, 1.0, 4.0 / 1.5])


def test_an_unobserved_endpoint_is_no_faster_than_its_slow_peers() -> None:
    assert levelled([5.0, 5.0, 1.0], unknown=(2,)) == pytest.approx(
        [5.0, 5.0, 1.5 * exp(2.0 * sqrt(PRIOR_VAR))]
    )
    assert levelled([3.0, 3.0, 1.0], unknown=(2,)) == pytest.approx([3.0, 3.0, 3.0])
    assert levelled([3.0, 3.0, 1.0]) == pytest.approx([3.0, 3.0, 1.5])


def test_a_slow_endpoint_is_passed_over_and_noise_decides_nothing() -> None:
    fleet = [outlook(slot) for slot in range(3)]
    for item, factor in zip(fleet, (1.1, 1.0, 3.0), strict=True):
        belief = item.load.belief
        belief.speeds = belief.speeds._replace(prefill=SpeedFactor(factor, 0.0))
        item.load.prefill_s_per_token *= factor
        item.load.attention_s_per_pair *= factor
    prices = PRICES.prices(ask(8000, 300), fleet)
    assert prices[0] == pytest.approx(prices[1])
    assert prices[2] > 1.2 * prices[0]


def test_the_halves_of_a_split_request_pay_for_what_they_do() -> None:
    question, one = ask(8000, 300), [outlook(0, answers=10, expected_tokens=5000)]
    prefill = PRICES.explain(question, one, 0, PhaseShare(decodes=0.0, transfer_s=0.2))
    decode, whole = (
        PRICES.explain(question, one, 0, DECODE_PHASE),
        PRICES.explain(question, one, 0, WHOLE_REQUEST),
    )
    assert prefill.tpot == 0.0
    assert prefill.ttft > whole.ttft
    assert prefill.work == pytest.approx(whole.work)
    assert decode.ttft < whole.ttft
    assert decode.work == 0.0
    one[0].load.eviction_regret = 0.5
    assert PRICES.explain(question, one, 0, DECODE_PHASE).work > prefill.work
    assert decode.tpot == pytest.approx(whole.tpot)
    assert decode.others < whole.others


def test_decoding_pays_for_the_prompts_queued_before_its_kv() -> None:
    question, idle, busy = ask(8000, 300), [outlook(0)], [outlook(0, prefill_done_at=103.0)]
    free, queued = (
        PRICES.explain(question, idle, 0, DECODE_PHASE),
        PRICES.explain(question, busy, 0, DECODE_PHASE),
    )
    assert free.ttft < 1e-4
    assert queued.ttft > 0.1


def test_answers_that_run_already_feel_half_of_the_prefills_that_new_ones_expect() -> None:
    question = ask(8000, 300)
    numbers = {"decode_s_per_token": 0.05, "answers": 20, "expected_tokens": 7000}
    crowded, among_prompts = outlook(0, **numbers), outlook(1, **numbers)
    among_prompts.load.decode_s_per_context_token = 1.5 * among_prompts.load.belief.context_s
    crowded.load.decode_s_per_context_token = crowded.load.belief.context_s
    assert term(question, among_prompts, "others") < term(question, crowded, "others")


def test_answers_that_are_late_in_any_case_have_less_to_lose_than_those_just_in_time() -> None:
    question = ask(8000, 300)
    numbers = {"answers": 20, "expected_tokens": 2000}
    in_time, late = (
        outlook(slot, prefill_done_at=100.0 + wait_s, **numbers)
        for slot, wait_s in enumerate((2.0, 60.0))
    )
    assert term(question, late, "others") < 0.5 * term(question, in_time, "others")


def test_halves_add_up_in_the_unrolled_form_as_well() -> None:
    fleet = [
        outlook(
            slot,
            prefill_done_at=100.0 + slot,
            answers=2 * slot,
            expected_tokens=700 * slot,
            kv_reserved=99_000 * slot,
            decode_s_per_context_token=9e-8 * slot,
        )
        for slot in range(4)
    ]
    question = ask(9000, 300, cached=[512, 4096])
    for part in (
        WHOLE_REQUEST,
        DECODE_PHASE,
        PhaseShare(decodes=0.0, transfer_s=0.7),
        PhaseShare(decodes=0.0, transfers_s=(0.1, 5.0, 0.0, 0.7)),
        PhaseShare(
            decodes=0.0,
            link_loads=[(LinkLoad(slot, 2.0 * slot, 0.5), IDLE_LINK) for slot in range(4)],
        ),
    ):
        totals = [PRICES.explain(question, fleet, index, part).total for index in range(4)]
        assert PRICES.prices(question, fleet, part) == pytest.approx(totals)


def test_a_transfer_pays_for_the_transfers_that_wait_behind_it() -> None:
    question, one = ask(8000, 300), [outlook(0)]

    def work(waiting: int, wait_s: float, service_s: float) -> float:
        links = [(LinkLoad(waiting, wait_s, service_s), IDLE_LINK)]
        return PRICES.explain(question, one, 0, PhaseShare(decodes=0.0, link_loads=links)).work

    free = work(0, 0.0, 0.0)
    idle, queued, crowded = (work(waiting, 0.4 * waiting, 0.4) - free for waiting in (0, 1, 3))
    assert 0.0 < idle < 0.01
    assert queued > 5.0 * idle
    assert crowded > 5.0 * queued
    assert work(3, 1.2, 0.04) - free < 0.2 * crowded


def test_the_cheapest_price_is_that_of_the_pick() -> None:
    fleet = [outlook(slot, prefill_done_at=101.0 + slot) for slot in range(4)]
    question = ask(9000, 300)
    picked = pick(policy_registry.build("priced", {}), question, fleet)
    assert picked is not None
    assert picked.candidate is fleet[0]
    assert min(PRICES.prices(question, fleet)) == pytest.approx(-picked.score)


def test_an_interactive_request_goes_where_a_batch_request_need_not() -> None:
    # The prefix is cached behind a queue of three seconds.
    #
    # Waiting is worthwhile with a budget of a minute, but not of three seconds, on engines that
    # prompts keep busy for most of the time.
    stretched_s = 3.0 * outlook(0).load.decode_s_per_context_token
    fleet = [
        outlook(0, prefill_done_at=103.0, decode_s_per_context_token=stretched_s),
        outlook(1, decode_s_per_context_token=stretched_s),
    ]
    usual = ask(30_000, 300, cached=[28_672])
    chosen = [
        PRICES.scores(
            replace(usual, request=replace(usual.request, slo=slo)),
            fleet,
        )
        for slo in (Slo("interactive", 3.0, 0.05), Slo("batch", 60.0, 0.5))
    ]
    assert chosen[0][1] > chosen[0][0]
    assert chosen[1][0] > chosen[1][1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"late": 0.5},
        {"work_weight": -1.0},
        {"fresh_s": -1.0},
        {"kv_weight": 1e10},
        {"equal_speed_factor": 0.0},
    ],
)
def test_weights_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(
        policy_registry.PolicyConfigError,
        match=f"priced.{next(iter(wrong))}: Expected `float` [<>]=",
    ):
        policy_registry.build("priced", wrong)


def test_equal_endpoints_price_a_long_prompt_equally_after_learning_from_different_prompts() -> (
    None
):
    # One endpoint learned from short prompts that all its work is slower. The others learned from
    # long prompts that attention is slower. Each has observed the truth, and equalizing a single
    # factor would make them differ.
    fleet = [outlook(slot) for slot in range(3)]
    for item, (prefill, pairs) in zip(
        fleet, ((1.02, 1.88), (1.6, 1.02), (1.68, 0.99)), strict=True
    ):
        belief = item.load.belief
        belief.prompts.factors[0], belief.prompts.factors[-1] = prefill, pairs
        belief.apply_factors()
        item.load.prefill_s_per_token, item.load.attention_s_per_pair = (
            belief.token_s,
            belief.pair_s,
        )
    scores = PRICES.scores(ask(90_000, 100), fleet)
    assert max(scores) / min(scores) == pytest.approx(1.0, abs=0.02)


def test_equal_endpoints_share_the_picks() -> None:
    policy, rng, counts = policy_registry.build("priced", {}), Random(3), [0] * 4
    fleet = [outlook(slot) for slot in range(4)]
    for _ in range(400):
        picked = pick(policy, replace(ask(1000, 100), rng=rng), fleet)
        assert picked is not None
        counts[picked.candidate.load.slot] += 1
    assert min(counts) > 60


def test_a_price_is_rounded_down_to_five_binary_digits() -> None:
    rng = Random(7)
    prices = sorted(10.0 ** rng.uniform(-9.0, 3.0) for _ in range(2_000))
    rounded = [round_down(price) for price in prices]
    assert rounded == sorted(rounded)
    assert all(0.93 * price < less <= price for price, less in zip(prices, rounded, strict=True))
    assert len({round_down(0.5 + place / 4_000) for place in range(2_000)}) <= 18
    assert round_down(0.0) == 0.0


def test_idle_endpoints_that_were_busy_to_a_different_degree_share_a_place_in_the_order() -> None:
    rested, tired, serving = (
        outlook(0),
        outlook(1, decode_s_per_token=1.01 * outlook(0).load.decode_s_per_token),
        outlook(2, in_flight=1),
    )
    keys = [PRICES.usual_price(one, 100.0) for one in (rested, tired, serving)]
    assert keys[0] == keys[1] < keys[2]


def test_the_order_of_a_large_pool_is_by_the_budgets_of_most_requests() -> None:
    by, fleet = PriceScorer(PricedPolicy(measured_share=0.0)), [outlook(0), outlook(1)]
    busy = outlook(2, decoding=9, in_flight=9, decode_s_per_token=0.04)

    def asked(count: int, slo: Slo) -> float:
        question = ask()
        request = replace(question.request, slo=slo)
        for _ in range(count):
            by.scores(replace(question, request=request), fleet)
        return by.usual_price(busy, 100.0)

    loose, tight = Slo("loose", 50.0, 1.0), Slo("tight", 0.5, 0.02)
    at_first = asked(1, loose)
    assert asked(MOST_VOTES, loose) == at_first
    assert asked(MOST_VOTES // 2, tight) == at_first, "fewer than half"
    assert asked(MOST_VOTES, tight) > 10 * at_first
    assert asked(1, loose) > 10 * at_first
