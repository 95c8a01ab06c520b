"""Property tests of the rule that decides whether to split a request into prefill and decode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.builtin_policies import PrefixAware
from policies.pricing.split_decision import (
    PairGroup,
    SplitPools,
    SplitRule,
    SplitShape,
    build_splitter,
)
from tests.unit.policies.builders import ask, candidate

rules = st.builds(SplitRule, st.integers(1, 100_000), st.floats(0, 0.99))
prompts = st.lists(st.integers(0, 200_000), min_size=1, max_size=30)
SHAPE = SplitShape()


def decisions(rule: SplitRule, tokens: list[int], splitting: bool = False) -> list[bool]:
    pools = SplitPools((PairGroup("g", (candidate(0),), (candidate(1),)),), (candidate(1),))
    one, results = build_splitter(rule, PrefixAware().build()), []
    for prompt in tokens:
        decision = one.decide(pools, ask(prompt), SHAPE, splitting)
        splitting = decision.splitting
        results.append(decision.pair is not None)
    return results


@given(rules, prompts)
def test_above_the_band_all_are_split_and_below_it_none(rule: SplitRule, tokens: list[int]) -> None:
    low, high = (
        rule.threshold_tokens * (1 - rule.hysteresis),
        rule.threshold_tokens * (1 + rule.hysteresis),
    )
    for prompt, split in zip(tokens, decisions(rule, tokens), strict=True):
        if prompt > high + 1e-6 * high:
            assert split
        if prompt < low - 1e-6 * high:
            assert not split


@given(rules, st.data(), st.booleans())
def test_inside_the_band_the_mode_never_changes(
    rule: SplitRule, data: st.DataObject, splitting: bool
) -> None:
    low, high = (
        rule.threshold_tokens * (1 - rule.hysteresis),
        rule.threshold_tokens * (1 + rule.hysteresis),
    )
    inside = [n for n in (int(low) + 1, rule.threshold_tokens, int(high) - 1) if low < n < high]
    if inside:
        tokens = data.draw(st.lists(st.sampled_from(inside), min_size=1, max_size=20))
        assert set(decisions(rule, tokens, splitting)) == {splitting}


@given(rules, st.integers(0, 200_000), st.integers(0, 200_000), st.booleans())
def test_a_longer_prompt_is_never_less_likely_split(
    rule: SplitRule, a: int, b: int, splitting: bool
) -> None:
    shorter, longer = sorted((a, b))
    assert decisions(rule, [shorter], splitting) <= decisions(rule, [longer], splitting)
