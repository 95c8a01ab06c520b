"""Property tests of the arithmetic of routing rules that other projects have published."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import pickers
from policies.engine.step_time import SpeedBelief, StepCosts
from policies.published.dualmap import DualMap, HotPrefixes, TwoHashPicker
from policies.published.dynamo import DynamoKv, blocks
from policies.published.llmd_blend import ColdTurns, short_queue
from policies.published.llmd_predictor import latency
from policies.published.preble import SentWindow, SentWork
from policies.routing_types import Slo
from tests.unit.policies.builders import ask, candidate
from tests.unit.policies.published.test_published import PACE, asked, prompt

INSTANT = SpeedBelief(StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
few = settings(max_examples=60)
scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=9)


@few
@given(scores, st.data(), st.integers())
def test_best_then_is_the_least_of_minus_score_then_costs(
    given_: list[float], data: st.DataObject, seed: int
) -> None:
    loads = [data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in given_]
    fleet = [
        candidate(slot, in_flight=one, decode_tokens=two) for slot, (one, two) in enumerate(loads)
    ]
    pick = pickers.best_with_tie_breakers(
        lambda load: load.in_flight, lambda load: load.decode_tokens
    )
    result = pick(ask(seed=seed), fleet, given_)
    order = [(-score, *load) for score, load in zip(given_, loads, strict=True)]
    assert order[result] == min(order)


@few
@given(scores, st.integers())
def test_the_better_of_two_is_never_the_only_worst(given_: list[float], seed: int) -> None:
    result = pickers.better_of_two(ask(seed=seed), [], given_)
    assert 0 <= result < len(given_)
    assert len(given_) == 1 or given_[result] > min(given_) or given_.count(min(given_)) > 1


@few
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9), st.floats(0, 10), st.integers())
def test_softmax_always_draws_a_candidate(
    given_: list[float], temperature: float, seed: int
) -> None:
    fleet = [candidate(slot) for slot in range(len(given_))]
    result = pickers.softmax(temperature)(ask(seed=seed), fleet, given_)
    assert 0 <= result < len(given_)
    if temperature == 0:
        assert given_[result] == max(given_)


@few
@given(
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=1, max_size=6), st.integers(0, 10**6)
)
def test_dynamos_cost_is_never_below_the_blocks_in_use(
    loads: list[tuple[int, int, int]], size: int
) -> None:
    fleet = [
        candidate(slot, prefill_tokens=one, decode_tokens=two)
        for slot, (one, two, _) in enumerate(loads)
    ]
    cached = [min(size, cached_tokens) for _, _, cached_tokens in loads]
    for score, (one, two, _) in zip(
        blocks(DynamoKv())(ask(size, cached=cached), fleet), loads, strict=True
    ):
        assert -score >= (one + two) / 16 - 1e-6
        assert -score <= (2 * one + two + size) / 16 + 1e-6


@few
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_queue_scores_reach_from_nought_to_one_and_fall_with_the_queue(queues: list[int]) -> None:
    result = short_queue(5.0)(
        ask(), [candidate(slot, in_flight=queue) for slot, queue in enumerate(queues)]
    )
    assert max(result) == 1.0
    assert min(result) == (0.0 if len(set(queues)) > 1 else 1.0)
    for (one, score), (other, rival) in pairwise(zip(queues, result, strict=True)):
        assert (one < other) == (score > rival)


@few
@given(st.lists(st.booleans(), max_size=40), st.integers(2, 6), st.integers())
def test_cold_prompts_go_round_whatever_hits_come_between(
    hits: list[bool], size: int, seed: int
) -> None:
    turns, fleet, rng = ColdTurns(), [candidate(slot) for slot in range(size)], Random(seed)
    took: Counter[int] = Counter()
    for hit in hits:
        question = ask(cached=[500] if hit else [], seed=rng.randrange(10**9))
        result = turns.score(question, fleet)
        assert all(0.0 <= score <= 1.0 for score in result)
        chosen = turns.pick(question, fleet, result)
        took[chosen] += not hit
    assert max(took.values(), default=0) - min((took[slot] for slot in range(size)), default=0) <= 1


@few
@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), min_size=1, max_size=9),
    st.floats(0.1, 10),
    st.floats(0.01, 1),
)
def test_a_prediction_in_time_beats_every_one_that_is_not(
    latencies: list[tuple[float, float]], ttft_s: float, tpot_s: float
) -> None:
    fleet = [candidate(slot, **PACE) for slot in range(len(latencies))]
    for each, (first, step) in zip(fleet, latencies, strict=True):
        each.load.prefill_done_at, each.load.decode_s_per_token, each.load.belief = (
            100.0 + first,
            step,
            INSTANT,
        )
    result = latency(0.8, 0.2)(asked(Slo("chat", ttft_s, tpot_s)), fleet)
    in_time = [
        each.load.prefill_done_at - 100.0 <= ttft_s and each.load.decode_s_per_token <= tpot_s
        for each in fleet
    ]
    for score, good in zip(result, in_time, strict=True):
        assert (score >= 3.0 - 1e-9) if good else (score <= 3.0 + 1e-9)


@few
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 5), st.integers(0, 3), st.integers(1, 100)),
        max_size=40,
    )
)
def test_prebles_window_is_the_sum_of_what_is_in_it(
    steps: list[tuple[float, int, int, int]],
) -> None:
    window, now, recent = SentWindow(60.0), 0.0, dict[str, SentWork]()
    for later, request, slot, tokens in steps:
        now += later
        window.expire(now)
        window.add(SentWork(now, f"{request}", slot, tokens / 7, tokens // 2, tokens))
        recent[f"{request}"] = SentWork(now, f"{request}", slot, tokens / 7, tokens // 2, tokens)
        recent = {name: each for name, each in recent.items() if each.at >= now - 60.0}
        assert len(window) == len(recent)
        for place in range(4):
            mine = [each for each in recent.values() if each.slot == place]
            assert abs(window.seconds(place) - sum(each.seconds for each in mine)) < 1e-9
            prompts = sum(each.prompt for each in mine)
            share = sum(each.cached for each in mine) / prompts if prompts else 0.0
            assert abs(window.hit_share(place) - share) < 1e-9


@few
@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 40), min_size=3, max_size=12), st.data())
def test_a_pair_of_two_hashes_outlives_the_loss_of_any_other(
    key: int, slots: set[int], data: st.DataObject
) -> None:
    hashes, fleet = TwoHashPicker(DualMap()), [candidate(slot) for slot in sorted(slots)]
    pair = hashes._pair(key, fleet)
    assert pair[0] != pair[1]
    lost = data.draw(st.sampled_from([index for index in range(len(fleet)) if index not in pair]))
    left = [each for index, each in enumerate(fleet) if index != lost]
    assert [left[index] for index in hashes._pair(key, left)] == [fleet[index] for index in pair]


@few
@given(st.lists(st.integers(0, 6), max_size=300))
def test_the_memory_of_hot_prefixes_is_its_window(numbers: list[int]) -> None:
    hot = HotPrefixes(0.0612, 50, 20)
    for number in numbers:
        prints = prompt(number, blocks=5, system=3)
        assert hot.key(prints) in prints.keys.tolist()
        assert len(hot._recent) <= 50
        assert sum(hot._counts.values()) == len(hot._recent)
