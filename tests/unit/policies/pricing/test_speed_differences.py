"""Tests of requests that find out whether the label "slow GPU" of an endpoint is true."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from policies import policy_registry
from policies.candidate_order import create_order
from policies.endpoint_load import LoadChanges
from policies.engine.step_time import SpeedBelief, SpeedFactor, UsualSpeeds
from policies.pricing.endpoint_price import PricedPolicy, PriceScorer
from policies.pricing.pool_speeds import LONGEST_WAIT_S
from policies.pricing.speed_differences import PASSED, LateTests, was_measured
from policies.routing_types import Candidate, RoutingQuery
from tests.unit.policies.builders import ask, outlook


def labelled_slow(slot: int, times: float = 10.0, **numbers: object) -> Candidate:
    # Return a candidate that computes prompts `times` as slowly as outlook()'s, by its label only.
    one = outlook(slot, prefill_s_per_token=6e-5 * times, **numbers)
    belief = one.load.belief
    shape = replace(belief.shape, token_s=times * belief.shape.token_s)
    one.load.belief = SpeedBelief(shape)
    return one


def choice(fleet: Sequence[Candidate], question: RoutingQuery, stream: bool = True) -> int:
    # Return the index of the endpoint that a new scorer prefers.
    request = replace(question.request, stream=stream)
    question = replace(question, request=request)
    scores = PriceScorer(PricedPolicy(measured_share=0.0)).scores(question, fleet)
    return scores.index(max(scores))


def test_an_idle_endpoint_that_its_label_calls_slow_is_tested_with_one_request() -> None:
    assert choice([outlook(0), labelled_slow(1)], ask(1000, 300)) == 1
    assert choice([outlook(0), labelled_slow(1, in_flight=1)], ask(1000, 300)) == 0


def test_a_test_of_a_slow_label_is_in_time_even_if_the_label_is_right() -> None:
    assert choice([outlook(0), labelled_slow(1)], ask(50_000, 300)) == 0
    assert choice([outlook(0), labelled_slow(1, decode_s_per_token=9.0)], ask(1000, 300)) == 0


def test_an_endpoint_with_requests_from_elsewhere_or_without_room_is_not_tested() -> None:
    elsewhere = {"external_requests": 50, "waiting": 50, "scraped_at": 99.0}
    assert choice([outlook(0), labelled_slow(1, **elsewhere)], ask(1000, 300)) == 0
    assert choice([outlook(0), labelled_slow(1, free_kv_tokens=500.0)], ask(1000, 300)) == 0


def test_a_label_is_not_tested_with_an_answer_that_hides_its_first_token() -> None:
    assert choice([outlook(0), labelled_slow(1)], ask(1000, 300), stream=False) == 0
    assert choice([outlook(0), labelled_slow(1)], ask(1000, 1), stream=False) == 1


class Asker:
    """Sends streamed requests to one scorer, one after another, and returns where each goes."""

    def __init__(self, fleet: Sequence[Candidate]) -> None:
        self.by, self.fleet, self.count = (
            PriceScorer(PricedPolicy(measured_share=0.0)),
            fleet,
            0,
        )

    def again(self, tried: Sequence[str] = ()) -> int:
        """Return the index of the endpoint that the scorer prefers for the last request now."""
        question = ask(1000, 300, tried=tried)
        request = replace(question.request, id=str(self.count), stream=True)
        scores = self.by.scores(replace(question, request=request), self.fleet)
        return scores.index(max(scores))

    def next(self, tried: Sequence[str] = ()) -> int:
        self.count += 1
        return self.again(tried)

    def chosen(self, count: int) -> list[int]:
        return [self.next() for _ in range(count)]


def never_in_time(slot: int, **numbers: object) -> Candidate:
    return labelled_slow(slot, decode_s_per_token=9.0, **numbers)


def test_a_label_that_lets_no_request_be_in_time_is_tested_by_one_of_many() -> None:
    asker = Asker([outlook(0), never_in_time(1)])
    assert asker.chosen(PASSED) == [0] * PASSED
    assert asker.next() == 1
    load = asker.fleet[1].load
    load.in_flight = 1
    assert asker.next() == 0
    load.in_flight = 0  # it has ended and shown nothing
    assert asker.chosen(PASSED + 1) == [*[0] * PASSED, 1]


def test_one_of_many_is_risked_also_where_no_test_is_seen_in_flight() -> None:
    # Requests come one at a time, and each test fails before its first token.
    asker = Asker([outlook(0), never_in_time(1)])
    assert asker.chosen(3 * (PASSED + 1)) == 3 * [*[0] * PASSED, 1]


def test_a_request_that_is_asked_for_again_counts_once_and_keeps_its_answer() -> None:
    asker = Asker([outlook(0), never_in_time(1)])
    for _ in range(PASSED):
        assert [asker.next(), asker.again()] == [0, 0]
    assert [asker.next(), asker.again(), asker.again()] == [1, 1, 1]
    assert [asker.next(), asker.again()] == [0, 0]


def test_of_many_late_labels_one_is_tested_at_a_time_each_in_turn() -> None:
    asker = Asker([outlook(0), *(never_in_time(slot) for slot in range(1, 9))])
    tested = [asker.chosen(PASSED + 1) for _ in range(9)]
    assert all(each[:-1] == [0] * PASSED for each in tested)
    assert [each[-1] for each in tested] == [1, 2, 3, 4, 5, 6, 7, 8, 1]


def test_a_request_that_has_failed_elsewhere_tests_no_label() -> None:
    asker = Asker([outlook(0), never_in_time(1)])
    asker.chosen(PASSED)
    assert asker.next(tried=["tp7"]) == 0
    assert asker.next() == 1
    in_time = Asker([outlook(0), labelled_slow(1)])
    assert [in_time.next(tried=["tp7"]), in_time.next()] == [0, 1]


def test_a_request_for_which_nothing_is_computed_tests_no_label() -> None:
    question = ask(1000, 1)
    assert choice([outlook(0), labelled_slow(1)], question) == 1
    uncounted = replace(question, computes_tokens=False)
    assert choice([outlook(0), labelled_slow(1)], uncounted) == 0


def test_a_new_endpoint_in_the_slot_of_another_is_passed_by_as_often() -> None:
    asker = Asker([outlook(0), never_in_time(1)])
    asker.chosen(PASSED)
    asker.fleet = [outlook(0), never_in_time(1)]
    assert asker.chosen(PASSED + 1) == [*[0] * PASSED, 1]


def test_a_request_that_a_label_makes_later_than_most_is_not_risked() -> None:
    tests, load = LateTests(), outlook(1).load
    assert all(tests.due(str(number), {5: (load, 2.0)}) is None for number in range(PASSED))
    assert tests.due("later", {5: (load, 2.1)}) is None
    assert tests.due("new", {5: (outlook(2).load, 2.0)}) is None
    assert tests.due("usual", {5: (load, 2.0)}) == 5


def test_a_slow_label_is_tested_in_a_pool_that_is_large_enough_for_a_shortlist() -> None:
    policy = policy_registry.build("priced", {"measured_share": 0.0})
    fleet = [*(outlook(slot) for slot in range(40)), labelled_slow(40), labelled_slow(41)]
    order, question = create_order(policy, fleet, LoadChanges()), ask(1000, 300)
    assert order is not None
    question = replace(question, request=replace(question.request, stream=True))
    tested = []
    for _ in range(4):
        picked = order.pick(question)
        assert picked is not None
        tested.append(picked.candidate.load.slot)
        load = picked.candidate.load
        load.belief.speeds = load.belief.speeds._replace(prefill=SpeedFactor(1.0, 0.1))
    assert tested[:2] == [40, 41]
    assert max(tested[2:]) < 40


def test_a_short_prompt_tests_a_label_only_once() -> None:
    slow = labelled_slow(1)
    slow.load.belief.observe_api_latency(0.01)
    assert choice([outlook(0), slow], ask(100, 300)) == 0
    assert choice([outlook(0), slow], ask(1000, 300)) == 1


def test_an_endpoint_that_was_observed_as_slow_is_not_tested() -> None:
    slow = labelled_slow(1)
    slow.load.belief.speeds = slow.load.belief.speeds._replace(prefill=SpeedFactor(1.0, 0.1))
    assert choice([outlook(0), slow], ask(1000, 300)) == 0


def test_an_endpoint_somewhat_slower_by_its_label_is_priced_and_not_tested() -> None:
    assert choice([outlook(0), labelled_slow(1, 1.9)], ask(8000, 300, cached=[7936])) == 0


def measured(one: Candidate, prefill: float = 1.0, step: float = 1.0) -> Candidate:
    belief = one.load.belief
    prompts, pairs, _ = belief.speeds
    belief.speeds = UsualSpeeds(SpeedFactor(prefill, 0.01), pairs, SpeedFactor(step, 0.01))
    assert prompts != belief.speeds.prefill
    return one


def test_until_half_of_the_endpoints_are_measured_the_least_prefill_work_decides() -> None:
    def fleet() -> list[Candidate]:
        return [outlook(0, prefill_tokens=9000), labelled_slow(1)]

    def picked(fleet: Sequence[Candidate]) -> int:
        scores = PriceScorer(PricedPolicy()).scores(ask(50_000, 300), fleet)
        return scores.index(max(scores))

    slow, quick = labelled_slow(1), outlook(0, prefill_tokens=9000)
    assert picked(fleet()) == 1, "work counts, and labels do not"
    assert picked([measured(quick), slow]) == 0
    assert picked([outlook(0, prefill_tokens=9000), measured(slow)]) == 0


def test_prefill_or_decoding_alone_is_enough_after_a_while() -> None:
    quick, slow = outlook(0, prefill_tokens=9000), labelled_slow(1)
    by, question = PriceScorer(PricedPolicy()), ask(50_000, 300)

    def picked(now: float) -> int:
        scores = by.scores(replace(question, now=now), [quick, slow])
        return scores.index(max(scores))

    assert picked(100.0) == picked(200.0) == 1, "nothing is known, however long it takes"
    belief = quick.load.belief
    belief.speeds = belief.speeds._replace(prefill=SpeedFactor(1.0, 0.01))
    assert picked(200.0) == picked(200.0 + 0.9 * LONGEST_WAIT_S) == 1
    assert picked(200.0 + LONGEST_WAIT_S) == 0


def test_an_endpoint_is_measured_when_prompts_and_decoding_were_observed() -> None:
    belief = SpeedBelief()
    assert not was_measured(belief.speeds)
    belief.observe_prefill(1.1, [0.0, 0.0, 0.0, 0.0, 1.0], 0.1, 0.01)
    assert not was_measured(belief.speeds)
    belief.observe_decode(1.0, 0.8, 0.1, 0.01)
    assert was_measured(belief.speeds)


def test_the_best_score_before_measurements_is_a_price_to_compare_pairs_with() -> None:
    fleet, question = [outlook(0, prefill_tokens=9000), outlook(1)], ask(8000, 300)
    by = PriceScorer(PricedPolicy())
    first, second = by.scores(question, fleet)
    assert second == pytest.approx(-by.explain(question, fleet, 1).total)
    assert first < second
