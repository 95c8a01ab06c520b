"""Tests of averaging what several comparisons of routing policies found, with the error."""

from __future__ import annotations

from math import sqrt

import pytest

from policies.auto.pooled_gains import HALF_LIFE_S, PooledGains
from policies.auto.replay_messages import MemberEstimate, PoolEstimate


def estimate(
    gain: float, error: float, incumbent: str = "old", requests: int = 1000
) -> PoolEstimate:
    spread = error * sqrt(7) / 2.36
    gains = (gain - spread, gain + spread) * 4
    members = (
        MemberEstimate(incumbent, 0.8),
        MemberEstimate("new", 0.8 + gain, gain, error, gains),
    )
    return PoolEstimate("main", incumbent, requests, 300.0, "", members, until_s=50.0)


def test_a_single_comparison_keeps_its_gain_and_its_error() -> None:
    evidence = PooledGains()
    evidence.add(0.0, estimate(0.05, 0.03))
    (new,) = evidence.pooled(0.0)
    assert (new.member, new.gain) == ("new", pytest.approx(0.05))
    assert new.error == pytest.approx(0.03)


def test_comparisons_that_agree_have_a_smaller_error_than_each_of_them() -> None:
    evidence = PooledGains()
    for step in range(5):
        evidence.add(300.0 * step, estimate(0.03, 0.04))
    (new,) = evidence.pooled(1200.0)
    assert (new.gain, evidence.requests) == (pytest.approx(0.03), 5000)
    assert new.error < 0.017


def test_comparisons_that_contradict_each_other_have_a_larger_error() -> None:
    evidence = PooledGains()
    for step in range(4):
        evidence.add(300.0 * step, estimate(0.1 if step % 2 else -0.1, 0.01))
    (new,) = evidence.pooled(900.0)
    assert abs(new.gain) < 0.02
    assert new.error > 0.03


def test_old_comparisons_count_less() -> None:
    evidence = PooledGains()
    evidence.add(0.0, estimate(-0.1, 0.01))
    evidence.add(3 * HALF_LIFE_S, estimate(0.1, 0.01))
    (new,) = evidence.pooled(3 * HALF_LIFE_S)
    assert new.gain == pytest.approx((0.1 - 0.1 / 8) / (1 + 1 / 8))


def test_comparisons_with_another_policy_in_force_are_forgotten() -> None:
    evidence = PooledGains()
    evidence.add(0.0, estimate(0.1, 0.01, "older"))
    evidence.add(300.0, estimate(-0.1, 0.01))
    assert (evidence.comparisons, evidence.until_s) == (1, 50.0)
    evidence.forget()
    assert (evidence.pooled(300.0), evidence.until_s) == ([], 0.0)
