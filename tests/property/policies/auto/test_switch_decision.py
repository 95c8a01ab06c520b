"""Property tests of the rule that decides when a pool switches to another routing policy."""

from __future__ import annotations

from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from policies.auto.replay_messages import MemberEstimate, PoolEstimate
from policies.auto.switch_decision import (
    HOUR_S,
    LEAST_GAIN,
    LEAST_REQUESTS,
    MOST_SWITCHES,
    Action,
    PolicyDecider,
)

NAMES = ("a", "b", "c", "d")
SHARES = st.floats(-1, 1)
ESTIMATES = st.tuples(
    st.floats(1, 1800),  # seconds since the last estimate
    st.lists(st.tuples(SHARES, st.floats(0, 0.3)), min_size=4, max_size=4),
    st.integers(0, 2 * LEAST_REQUESTS),
    st.sampled_from(("", "", "", "wrong")),
    st.booleans(),
)


def blocks(gain: float, error: float) -> tuple[float, ...]:
    spread = error * sqrt(7) / 2.36
    return (gain - spread, gain + spread) * 4


def estimate_of(
    incumbent: str, gains: list[tuple[float, float]], requests: int = 1000, doubt: str = ""
) -> PoolEstimate:
    members = [
        MemberEstimate(name, 0.5, 0.0 if name == incumbent else gain, error, blocks(gain, error))
        for name, (gain, error) in zip(NAMES, gains, strict=True)
    ]
    return PoolEstimate("main", incumbent, requests, 600.0, doubt, tuple(members))


@given(st.lists(ESTIMATES, max_size=60))
def test_every_switch_is_justified_and_there_are_at_most_three_in_an_hour(
    rounds: list[tuple[float, list[tuple[float, float]], int, str, bool]],
) -> None:
    decider, incumbent, now = PolicyDecider(), "a", 0.0
    switched_at: list[float] = []
    for pause_s, gains, requests, doubt, may_switch in rounds:
        now += pause_s
        estimate = estimate_of(incumbent, gains, requests, doubt)
        decision = decider.decide(now, estimate, may_switch=may_switch)
        assert decision.reason
        if decision.action is not Action.KEEP:
            assert decision.gain > decision.error + LEAST_GAIN
            assert requests >= LEAST_REQUESTS
            assert not doubt
            assert decision.member != incumbent
        if decision.action is Action.SWITCH:
            assert may_switch
            decider.on_switched(now, incumbent)
            incumbent = decision.member
            switched_at.append(now)
    for index, first in enumerate(switched_at[MOST_SWITCHES:]):
        assert first - switched_at[index] >= HOUR_S


@given(st.integers(1, 4), st.floats(0.0, 0.4), st.floats(0.05, 0.4))
def test_loads_that_alternate_faster_than_comparisons_cause_no_switch(
    period: int, error: float, gain: float
) -> None:
    # Policies a and b are better alternately, by less than the gain that one comparison needs for a
    # switch.
    decider, incumbent = PolicyDecider(), "a"
    gain = min(gain, 2 * (error + LEAST_GAIN) * 0.99)
    for step in range(48):
        is_b_better = (step // period) % 2 == 0
        sign = gain if is_b_better == (incumbent == "a") else -gain
        gains = [(sign, error), (sign, error), (-1.0, error), (-1.0, error)]
        decision = decider.decide(300.0 * step, estimate_of(incumbent, gains), may_switch=True)
        if decision.action is Action.SWITCH:
            assert period > 1
            decider.on_switched(300.0 * step, incumbent)
            incumbent = decision.member
    if period == 1:
        assert incumbent == "a"
