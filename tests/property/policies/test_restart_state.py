"""Property tests that a gateway can save and restore endpoints' health and its retry budget.

A successor process restores them. The tests save them after any events.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from policies.health.endpoint_health import (
    Health,
    HealthEvent,
    HealthLimits,
    HealthState,
    available_endpoints,
    is_probe_due,
    is_unreachable,
    next_health,
)
from policies.health.retry_budget import RetryBudget, RetryLimits

LIMITS = HealthLimits()
steps = st.lists(st.tuples(st.sampled_from(HealthEvent), st.floats(0, 100)), max_size=40)


def history(events: list[tuple[HealthEvent, float]], seed: int) -> list[Health]:
    healths, now, rng = [Health()], 0.0, Random(seed)
    for event, passed in events:
        now += passed
        healths.append(next_health(healths[-1], event, now, rng, LIMITS))
    return healths


@given(steps, st.integers())
def test_an_ejection_lasts_between_its_first_and_its_longest_length(
    events: list[tuple[HealthEvent, float]], seed: int
) -> None:
    healths, now = history(events, seed), 0.0
    for (_, passed), before, health in zip(events, healths, healths[1:], strict=False):
        now += passed
        if health.state in (HealthState.EJECTED, HealthState.DEAD):
            # If the endpoint is out, its time counts from now; `since` is when it left.
            if health.until != before.until:
                assert LIMITS.first_s * (1 - LIMITS.jitter) <= health.until - now + 1e-6
                assert health.until - now <= LIMITS.longest_s + 1e-6
            assert health.since <= now
            assert health.ejections >= 1
            assert health.cause is not None


@given(steps, st.integers())
def test_an_endpoint_returns_only_by_a_probe_and_is_up_only_after_returning(
    events: list[tuple[HealthEvent, float]], seed: int
) -> None:
    healths = history(events, seed)
    for (event, _), before, after in zip(events, healths, healths[1:], strict=False):
        if after.state is HealthState.RETURNING and before.state is not HealthState.RETURNING:
            assert event in (HealthEvent.PROBE_OK, HealthEvent.PROBE_OK_NEEDED)
        if after.state is HealthState.UP and before.state is not HealthState.UP:
            assert before.state is HealthState.RETURNING


@given(steps, st.integers())
def test_every_endpoint_comes_back_once_it_is_well(
    events: list[tuple[HealthEvent, float]], seed: int
) -> None:
    health = history(events, seed)[-1]
    now, rng = health.until, Random(seed)
    if health.state in (HealthState.EJECTED, HealthState.DEAD):
        assert is_probe_due(health, now)
        health = next_health(health, HealthEvent.PROBE_OK, now, rng, LIMITS)
    for _ in range(LIMITS.successes_to_return):
        health = next_health(health, HealthEvent.SUCCEEDED, now, rng, LIMITS)
    assert health.state is HealthState.UP


healths = st.builds(
    Health,
    state=st.sampled_from(HealthState),
    until=st.floats(0, 1000),
    cause=st.none() | st.sampled_from(HealthEvent),
)


@given(st.lists(healths, max_size=12))
def test_a_pool_with_a_living_endpoint_always_has_an_available_one(pool: list[Health]) -> None:
    mask = available_endpoints(pool, LIMITS)
    living = [
        health.state is not HealthState.DEAD and not is_unreachable(health) for health in pool
    ]
    assert len(mask) == len(pool)
    assert any(mask) == any(living)
    assert all(alive for alive, is_selected in zip(living, mask, strict=True) if is_selected)
    assert sum(living) - sum(mask) <= max(1, sum(living) // 2)
    assert all(
        is_selected
        for health, is_selected in zip(pool, mask, strict=True)
        if health.state in (HealthState.UP, HealthState.RETURNING)
    )


@given(st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=100))
def test_retries_running_never_exceed_the_budget_of_any_moment_they_began_in(
    history: list[int | None],
) -> None:
    budget, running = RetryBudget(RetryLimits()), 0
    for active in history:
        if active is None:
            if running:
                budget.release()
                running -= 1
        elif budget.try_take(active):
            assert running < 3 + 0.2 * active
            running += 1
        assert budget.running == running
