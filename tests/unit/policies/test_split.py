"""Split or not, and between whom."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from policies.model import Candidate
from policies.presets import LeastLoaded, PrefixAware
from policies.split import Group, Pools, Reason, Shape, SplitRule, compat, splitter, unsplittable
from tests.unit.policies.builders import ask, candidate

SPLITTER = splitter(SplitRule(2000, 0.25), PrefixAware().build())


def pools(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], alone: Sequence[Candidate] | None = None
) -> Pools:
    group = Group("g", tuple(prefills), tuple(decodes))
    return Pools((group,), tuple(decodes if alone is None else alone))


FOUR = pools([candidate(0), candidate(1)], [candidate(2), candidate(3)])


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (Shape(), None),
        (Shape(max_tokens=1), None),
        (Shape(choices=2), Reason.CHOICES),
        (Shape(prompts=2), Reason.PROMPTS),
        (Shape(scores_prompt=True), Reason.PROMPT_SCORES),
    ],
)
def test_what_a_handoff_would_break_is_not_split_however_long(shape: Shape, why: Reason | None) -> None:
    assert unsplittable(shape) is why
    decision = SPLITTER.decide(FOUR, ask(100_000), shape, splitting=True)
    assert (decision.pair is None) == (why is not None or shape.max_tokens == 1)


@pytest.mark.parametrize(
    ("prompt", "cached", "splitting", "reason", "after"),
    [
        (1499, (), True, Reason.SHORT, False),
        (1500, (), True, Reason.LONG, True),
        (2499, (), False, Reason.SHORT, False),
        (2500, (), False, Reason.LONG, True),
        (9000, (0, 0, 8000, 8000), True, Reason.CACHED, False),
        (9000, (0, 0, 8000, 0), True, Reason.CACHED, False),
    ],
)
def test_the_uncached_tokens_at_the_decoder_decide_within_a_band(
    prompt: int, cached: Sequence[int], splitting: bool, reason: Reason, after: bool
) -> None:
    decision = SPLITTER.decide(FOUR, ask(prompt, cached=cached), Shape(), splitting)
    assert (decision.reason, decision.splitting) == (reason, after)


def test_one_token_is_not_worth_a_handoff() -> None:
    assert SPLITTER.decide(FOUR, ask(9000), Shape(max_tokens=1), False).reason is Reason.ONE_TOKEN


def test_a_short_request_that_nobody_serves_whole_is_split() -> None:
    nobody = msgspec.structs.replace(FOUR, alone=())
    decision = SPLITTER.decide(nobody, ask(10), Shape(max_tokens=1), False)
    assert decision.pair is not None
    assert decision.reason is Reason.NOBODY_ALONE


def test_the_least_loaded_decodes_and_who_holds_the_prefix_prefills() -> None:
    choice = pools([candidate(0), candidate(1)], [candidate(2, decode_tokens=50_000), candidate(3)])
    decision = SPLITTER.decide(choice, ask(8000, cached=(0, 6000)), Shape(), False)
    assert decision.pair is not None
    assert decision.pair.prefill.candidate.load.slot == 1
    assert decision.pair.prefill.cached_tokens == 6000
    assert decision.pair.decode.candidate.load.slot == 3


def test_an_endpoint_is_never_paired_with_itself() -> None:
    both = [candidate(0), candidate(1)]
    decision = SPLITTER.decide(pools(both, both), ask(8000), Shape(), False)
    assert decision.pair is not None
    assert decision.pair.prefill.candidate is not decision.pair.decode.candidate


def test_pairs_are_formed_inside_one_group() -> None:
    old = Group("old", (candidate(0),), (candidate(1),))
    new = Group("new", (candidate(2),), (candidate(3, decode_tokens=10**6),))
    decision = SPLITTER.decide(Pools((old, new), ()), ask(8000), Shape(), False)
    assert decision.pair is not None
    assert [decision.pair.prefill.candidate.load.slot, decision.pair.decode.candidate.load.slot] == [0, 1]


def test_a_decoder_whose_prefillers_are_all_away_is_not_chosen() -> None:
    old = Group("old", (candidate(0, available=False),), (candidate(1),))
    new = Group("new", (candidate(2),), (candidate(3, decode_tokens=10**6),))
    decision = SPLITTER.decide(Pools((old, new), ()), ask(8000), Shape(), False)
    assert decision.pair is not None
    assert decision.pair.decode.candidate.load.slot == 3


@pytest.mark.parametrize("tried", [("tp0", "tp1"), ("tp2", "tp3")])
def test_without_a_pair_the_request_is_served_whole(tried: Sequence[str]) -> None:
    decision = SPLITTER.decide(FOUR, ask(8000, tried=tried), Shape(), True)
    assert (decision.pair, decision.reason, decision.splitting) == (None, Reason.NO_PAIR, True)


def test_full_prefillers_mean_whole_requests_or_where_nobody_serves_those_a_queue() -> None:
    full = [candidate(0, cap=1, in_flight=1), candidate(1, cap=1, in_flight=2)]
    assert SPLITTER.decide(pools(full, [candidate(2)]), ask(8000), Shape(), False).reason is Reason.NO_PAIR
    queued = SPLITTER.decide(pools(full, [candidate(2)], alone=()), ask(8000), Shape(), False)
    assert queued.pair is not None
    full_decoder = pools([candidate(0)], [candidate(2, cap=1, in_flight=1)], alone=())
    assert SPLITTER.decide(full_decoder, ask(8000), Shape(), False).pair is None


def test_endpoints_fit_by_engine_model_version_and_dtype() -> None:
    assert compat("vllm", "m", {"zone": "a"}) == compat("vllm", "m", {"zone": "b"})
    groups = {
        compat("vllm", "m", {}),
        compat("sglang", "m", {}),
        compat("vllm", "n", {}),
        compat("vllm", "m", {"version": "0.33"}),
        compat("vllm", "m", {"kv_dtype": "0.33"}),
    }
    assert len(groups) == 5


def test_the_pools_own_policy_chooses_who_prefills() -> None:
    least = splitter(SplitRule(), LeastLoaded().build())
    assert (least.prefill.name, least.decode.name) == ("least_loaded", "decode_load")


@pytest.mark.parametrize("rule", [{"threshold_tokens": 0}, {"hysteresis": 1.0}, {"hysteresis": -0.1}])
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="threshold"):
        SplitRule(**rule)  # type: ignore[arg-type]
