"""Tests of endpoint health: each transition between states, and a limit for a whole pool."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from policies.health.endpoint_health import (
    Health,
    HealthEvent,
    HealthLimits,
    HealthState,
    available_endpoints,
    is_probe_due,
    is_proven,
    is_unreachable,
    next_health,
)

LIMITS = HealthLimits(jitter=0.0)
UP = Health()


def after(
    health: Health, *events: HealthEvent, now: float = 0.0, limits: HealthLimits = LIMITS
) -> Health:
    for event in events:
        health = next_health(health, event, now, Random(1), limits)
    return health


def test_three_failures_in_a_row_eject() -> None:
    assert after(UP, HealthEvent.FAILED, HealthEvent.TIMED_OUT).state is HealthState.UP
    assert (
        after(UP, HealthEvent.FAILED, HealthEvent.TIMED_OUT, HealthEvent.FAILED).state
        is HealthState.EJECTED
    )


def test_a_success_between_failures_resets_the_count() -> None:
    assert (
        after(
            UP,
            HealthEvent.FAILED,
            HealthEvent.FAILED,
            HealthEvent.SUCCEEDED,
            HealthEvent.FAILED,
            HealthEvent.FAILED,
        ).state
        is HealthState.UP
    )


def test_a_refused_connection_ejects_at_once() -> None:
    ejected = after(UP, HealthEvent.CONNECT_FAILED, now=10.0)
    assert (ejected.state, ejected.until, ejected.cause) == (
        HealthState.EJECTED,
        11.0,
        HealthEvent.CONNECT_FAILED,
    )


def test_a_thousand_malformed_requests_move_nothing() -> None:
    assert after(UP, *[HealthEvent.IGNORED] * 1000) is UP


@pytest.mark.parametrize("state", HealthState)
def test_ignored_is_ignored_everywhere(state: HealthState) -> None:
    health = Health(state, failures=2, ejections=1)
    assert after(health, HealthEvent.IGNORED) is health


def test_what_dies_together_counts_once() -> None:
    ejected = after(UP, HealthEvent.CONNECT_FAILED)
    assert after(ejected, *[HealthEvent.FAILED] * 50) is ejected


def test_a_good_probe_after_the_backoff_leads_back_through_three_good_answers() -> None:
    ejected = after(UP, HealthEvent.CONNECT_FAILED)
    assert not is_probe_due(ejected, 0.5)
    assert after(ejected, HealthEvent.PROBE_OK, now=0.5) is ejected
    assert is_probe_due(ejected, 1.0)
    returning = after(ejected, HealthEvent.PROBE_OK, now=1.0)
    assert returning.state is HealthState.RETURNING
    assert (
        after(returning, HealthEvent.SUCCEEDED, HealthEvent.SUCCEEDED).state
        is HealthState.RETURNING
    )
    assert after(returning, *[HealthEvent.SUCCEEDED] * 3).state is HealthState.UP


def test_one_failure_while_returning_doubles_the_backoff() -> None:
    returning = after(after(UP, HealthEvent.CONNECT_FAILED), HealthEvent.PROBE_OK, now=1.0)
    again = after(returning, HealthEvent.FAILED, now=2.0)
    assert (again.state, again.until) == (HealthState.EJECTED, 4.0)


def test_the_backoff_doubles_with_each_return_that_ends_badly_up_to_five_minutes() -> None:
    health, lengths = UP, []
    for _ in range(12):
        now = health.until
        health = after(
            after(health, HealthEvent.PROBE_OK, now=now), HealthEvent.CONNECT_FAILED, now=now
        )
        lengths.append(health.until - now)
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_failed_probes_lengthen_no_ejection_and_change_no_cause() -> None:
    ejected = after(UP, HealthEvent.CONNECT_FAILED, now=7.0)
    for now in range(8, 600):
        assert after(ejected, HealthEvent.PROBE_FAILED, now=now) is ejected
    assert after(ejected, HealthEvent.PROBE_OK, now=600.0).state is HealthState.RETURNING


def test_a_probe_that_goes_well_ends_a_long_backoff_where_no_other_endpoint_is_available() -> None:
    for state in (HealthState.EJECTED, HealthState.DEAD):
        out = Health(state, since=10.0, until=70.0, ejections=7)
        assert after(out, HealthEvent.PROBE_OK, now=11.0) is out
        assert after(out, HealthEvent.PROBE_OK_NEEDED, now=10.9) is out, (
            "it flaps: a second at least"
        )
        assert after(out, HealthEvent.PROBE_OK_NEEDED, now=11.0).state is HealthState.RETURNING
    first = after(UP, HealthEvent.CONNECT_FAILED)
    assert after(first, HealthEvent.PROBE_OK_NEEDED).state is HealthState.RETURNING


def test_an_ejected_endpoint_whose_connections_fail_is_unreachable_from_then_on() -> None:
    ejected = after(UP, *[HealthEvent.FAILED] * 3)
    assert not is_unreachable(ejected)
    lost = after(ejected, HealthEvent.CONNECT_FAILED, now=0.5)
    assert is_unreachable(lost)
    assert (lost.since, lost.until, lost.ejections) == (ejected.since, ejected.until, 1)
    assert after(lost, HealthEvent.CONNECT_FAILED) is lost


def test_an_endpoint_is_proven_until_a_failure_and_again_after_a_success() -> None:
    assert is_proven(UP)
    assert not is_proven(after(UP, HealthEvent.FAILED))
    assert is_proven(after(UP, HealthEvent.FAILED, HealthEvent.SUCCEEDED))
    returning = after(after(UP, HealthEvent.CONNECT_FAILED), HealthEvent.PROBE_OK, now=1.0)
    assert not is_proven(returning), "a probe is no answer"
    assert is_proven(after(returning, HealthEvent.SUCCEEDED))


def test_a_newcomer_that_never_answered_a_probe_says_so() -> None:
    newcomer = Health(HealthState.EJECTED, 3.0, until=3.0)
    assert after(newcomer, HealthEvent.PROBE_FAILED, now=3.0).cause is HealthEvent.PROBE_FAILED


def test_a_flapping_endpoint_is_ejected_less_than_once_a_minute_in_the_long_run() -> None:
    health, ejections = UP, []
    for now in range(3600):
        down = now % 4 >= 2
        before = health.state
        if is_probe_due(health, now):
            health = after(
                health, HealthEvent.PROBE_FAILED if down else HealthEvent.PROBE_OK, now=now
            )
        if health.state in (HealthState.UP, HealthState.RETURNING):
            health = after(
                health, HealthEvent.CONNECT_FAILED if down else HealthEvent.SUCCEEDED, now=now
            )
        if health.state is HealthState.EJECTED and before is not HealthState.EJECTED:
            ejections.append(now)
    late = [moment for moment in ejections if moment > 300]
    assert len(late) <= 3300 / 60
    assert len(ejections) - len(late) <= 9  # 1 + 2 + 4 ... + 256 s


def test_a_minute_without_an_ejection_is_forgiven() -> None:
    returned = after(
        after(after(UP, HealthEvent.CONNECT_FAILED), HealthEvent.PROBE_OK, now=1.0),
        *[HealthEvent.SUCCEEDED] * 3,
        now=2.0,
    )
    assert after(returned, HealthEvent.SUCCEEDED, now=61.0).ejections == 1
    assert after(returned, HealthEvent.SUCCEEDED, now=62.0).ejections == 0


def test_jitter_spreads_returns() -> None:
    lengths = {
        next_health(UP, HealthEvent.CONNECT_FAILED, 0.0, Random(seed), HealthLimits()).until
        for seed in range(50)
    }
    assert len(lengths) == 50
    assert all(0.8 <= length <= 1.2 for length in lengths)


def test_an_engine_that_reports_dead_is_dead_in_any_state() -> None:
    for state in (HealthState.UP, HealthState.RETURNING, HealthState.EJECTED):
        assert after(Health(state), HealthEvent.ENGINE_DEAD).state is HealthState.DEAD
    assert (
        after(Health(HealthState.DEAD, until=5.0), HealthEvent.PROBE_OK, now=5.0).state
        is HealthState.RETURNING
    )


def test_passive_evidence_ejects_half_a_pool_at_most() -> None:
    out = [Health(HealthState.EJECTED, until=float(number)) for number in range(4)]
    assert available_endpoints(out, LIMITS) == [True, True, False, False]
    assert available_endpoints([*out, UP, UP, UP, UP], LIMITS) == [False] * 4 + [True] * 4


def test_the_last_living_endpoint_is_never_ejected() -> None:
    out = Health(HealthState.EJECTED, until=9.0)
    assert available_endpoints([out], LIMITS) == [True]
    assert available_endpoints(
        [out, Health(HealthState.DEAD), Health(HealthState.DEAD)], LIMITS
    ) == [True, False, False]
    assert available_endpoints([out, out], LIMITS).count(True) == 1


def test_no_rule_of_a_pool_brings_back_an_endpoint_that_refuses_connections() -> None:
    refused = after(UP, HealthEvent.CONNECT_FAILED)
    assert available_endpoints([refused] * 7 + [UP], LIMITS) == [False] * 7 + [True]
    assert available_endpoints([refused] * 3, LIMITS) == [False] * 3
    failing = Health(HealthState.EJECTED, until=9.0, cause=HealthEvent.FAILED)
    assert available_endpoints([refused, refused, failing], LIMITS) == [False, False, True]


def test_all_dead_is_all_dead() -> None:
    assert available_endpoints([Health(HealthState.DEAD)] * 3, LIMITS) == [False] * 3
    assert available_endpoints([], LIMITS) == []


def test_every_state_answers_every_event() -> None:
    for state, event in product(HealthState, HealthEvent):
        assert after(Health(state), event).state in HealthState
