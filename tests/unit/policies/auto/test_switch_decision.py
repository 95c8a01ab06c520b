"""Tests of choosing among routing policies: required evidence, limits and reasons."""

from __future__ import annotations

from math import sqrt

from policies.auto.replay_messages import MemberEstimate, PolicyMember, PoolEstimate
from policies.auto.switch_decision import HOUR_S, Action, PolicyDecider


def member(name: str, gain: float, error: float) -> MemberEstimate:
    """Return the estimate of a policy's gain from eight blocks with this mean and error."""
    spread = error * sqrt(7) / 2.36
    return MemberEstimate(name, 0.8 + gain, gain, error, (gain - spread, gain + spread) * 4)


def estimate(gain: float, error: float = 0.01, **changes: object) -> PoolEstimate:
    members = (MemberEstimate("slow", 0.8), member("fast", gain, error))
    values: dict[str, object] = {
        "pool": "main",
        "incumbent": "slow",
        "requests": 1000,
        "span_s": 600.0,
        "doubt": "",
        "members": members,
        "until_s": 100.0,
    }
    return PoolEstimate(**(values | changes))  # type: ignore[arg-type]


def test_a_large_gain_switches_at_once_and_a_small_one_when_it_is_seen_twice() -> None:
    assert PolicyDecider().decide(0, estimate(0.1), may_switch=True).action is Action.SWITCH
    decider = PolicyDecider()
    first = decider.decide(0, estimate(0.03), may_switch=True)
    assert (first.action, "must confirm" in first.reason) == (Action.KEEP, True)
    second = decider.decide(300, estimate(0.03), may_switch=True)
    assert (second.action, second.member) == (Action.SWITCH, "fast")
    assert second.reason == (
        "fast would have served 3.0 points more (error 0.6 points) of 2000 requests"
    )


def test_an_unusable_estimate_changes_nothing_and_the_confirmation_waits_for_the_next() -> None:
    decider = PolicyDecider()
    decider.decide(0, estimate(0.03), may_switch=True)
    doubtful = decider.decide(1, estimate(0.5, doubt="TPOT differs"), may_switch=True)
    assert doubtful.reason == "the replay does not reproduce the log: TPOT differs"
    few = decider.decide(2, estimate(0.5, requests=10), may_switch=True)
    assert few.reason == "only 10 requests were compared, of 200 needed"
    assert decider.counted_until_s == 100.0
    assert decider.decide(3, estimate(0.03), may_switch=True).action is Action.SWITCH


def test_comparisons_that_each_show_too_little_justify_a_switch_together() -> None:
    decider = PolicyDecider()
    actions = [
        decider.decide(300.0 * step, estimate(0.025, 0.03), may_switch=True).action
        for step in range(5)
    ]
    assert actions[:2] == [Action.KEEP] * 2
    assert actions[-1] is Action.SWITCH


def test_a_switch_or_another_fleet_makes_earlier_estimates_void() -> None:
    for forget in (lambda one: one.on_switched(0.0, "older"), PolicyDecider.forget):
        decider = PolicyDecider()
        decider.decide(0, estimate(0.03), may_switch=True)
        forget(decider)
        assert decider.counted_until_s == 0.0
        assert decider.decide(300, estimate(0.03), may_switch=True).action is Action.KEEP


def test_a_gain_within_its_error_never_switches() -> None:
    decider = PolicyDecider()
    for now in range(10):
        decision = decider.decide(now, estimate(0.05, 0.3), may_switch=True)
        assert (decision.action, decision.member) == (Action.KEEP, "fast")


def test_without_permission_a_switch_is_advice() -> None:
    assert PolicyDecider().decide(0, estimate(0.1), may_switch=False).action is Action.ADVISE


def test_a_fourth_switch_within_an_hour_is_not_made() -> None:
    decider = PolicyDecider()
    for now in (0.0, 10.0, 20.0):
        decider.on_switched(now, "other")
    decision = decider.decide(30.0, estimate(0.5), may_switch=True)
    assert (decision.action, "3 changes" in decision.reason) == (Action.KEEP, True)
    assert decider.decide(HOUR_S, estimate(0.5), may_switch=True).action is Action.SWITCH


def test_a_return_within_the_hour_needs_twice_the_gain() -> None:
    decider = PolicyDecider()
    decider.on_switched(0.0, "fast")
    for now in (1.0, 2.0):
        assert decider.decide(now, estimate(0.03), may_switch=True).action is Action.KEEP
    decider.decide(HOUR_S, estimate(0.03), may_switch=True)
    assert decider.decide(HOUR_S + 1, estimate(0.03), may_switch=True).action is Action.SWITCH


def test_a_portfolio_of_one_policy_is_kept() -> None:
    alone = estimate(0.5, members=(MemberEstimate("slow", 0.8),))
    assert PolicyDecider().decide(0, alone, may_switch=True).action is Action.KEEP


def test_a_member_is_named_by_its_policy_and_parameters() -> None:
    assert PolicyMember("priced").label == "priced"
    assert (
        PolicyMember("least_loaded", {"fresh_s": 2, "a": 1}).label == "least_loaded(a=1,fresh_s=2)"
    )
