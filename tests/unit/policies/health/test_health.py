"""Health: the table, transition by transition, and the rule for a pool."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from policies.health.health import (
    Event,
    Health,
    HealthLimits,
    State,
    advance,
    available,
    is_proven,
    is_unreachable,
    probe_due,
)

LIMITS = HealthLimits(jitter=0.0)
UP = Health()


def after(
    health: Health, *events: Event, now: float = 0.0, limits: HealthLimits = LIMITS
) -> Health:
    for event in events:
        health = advance(health, event, now, Random(1), limits)
    return health


def test_three_failures_in_a_row_eject() -> None:
    assert after(UP, Event.FAILED, Event.TIMED_OUT).state is State.UP
    assert after(UP, Event.FAILED, Event.TIMED_OUT, Event.FAILED).state is State.EJECTED


def test_a_success_between_failures_resets_the_count() -> None:
    assert (
        after(UP, Event.FAILED, Event.FAILED, Event.SUCCEEDED, Event.FAILED, Event.FAILED).state
        is State.UP
    )


def test_a_refused_connection_ejects_at_once() -> None:
    ejected = after(UP, Event.CONNECT_FAILED, now=10.0)
    assert (ejected.state, ejected.until, ejected.cause) == (
        State.EJECTED,
        11.0,
        Event.CONNECT_FAILED,
    )


def test_a_thousand_malformed_requests_move_nothing() -> None:
    assert after(UP, *[Event.IGNORED] * 1000) is UP


@pytest.mark.parametrize("state", State)
def test_ignored_is_ignored_everywhere(state: State) -> None:
    health = Health(state, failures=2, ejections=1)
    assert after(health, Event.IGNORED) is health


def test_what_dies_together_counts_once() -> None:
    ejected = after(UP, Event.CONNECT_FAILED)
    assert after(ejected, *[Event.FAILED] * 50) is ejected


def test_a_good_probe_after_the_backoff_leads_back_through_three_good_answers() -> None:
    ejected = after(UP, Event.CONNECT_FAILED)
    assert not probe_due(ejected, 0.5)
    assert after(ejected, Event.PROBE_OK, now=0.5) is ejected
    assert probe_due(ejected, 1.0)
    returning = after(ejected, Event.PROBE_OK, now=1.0)
    assert returning.state is State.RETURNING
    assert after(returning, Event.SUCCEEDED, Event.SUCCEEDED).state is State.RETURNING
    assert after(returning, *[Event.SUCCEEDED] * 3).state is State.UP


def test_one_failure_while_returning_doubles_the_backoff() -> None:
    returning = after(after(UP, Event.CONNECT_FAILED), Event.PROBE_OK, now=1.0)
    again = after(returning, Event.FAILED, now=2.0)
    assert (again.state, again.until) == (State.EJECTED, 4.0)


def test_the_backoff_doubles_with_each_return_that_ends_badly_up_to_five_minutes() -> None:
    health, lengths = UP, []
    for _ in range(12):
        now = health.until
        health = after(after(health, Event.PROBE_OK, now=now), Event.CONNECT_FAILED, now=now)
        lengths.append(health.until - now)
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_failed_probes_lengthen_no_ejection_and_change_no_cause() -> None:
    ejected = after(UP, Event.CONNECT_FAILED, now=7.0)
    for now in range(8, 600):
        assert after(ejected, Event.PROBE_FAILED, now=now) is ejected
    assert after(ejected, Event.PROBE_OK, now=600.0).state is State.RETURNING


def test_a_probe_that_goes_well_ends_a_long_backoff_where_no_other_endpoint_is_available() -> None:
    for state in (State.EJECTED, State.DEAD):
        out = Health(state, since=10.0, until=70.0, ejections=7)
        assert after(out, Event.PROBE_OK, now=11.0) is out
        assert after(out, Event.PROBE_OK_NEEDED, now=10.9) is out, "it flaps: a second at least"
        assert after(out, Event.PROBE_OK_NEEDED, now=11.0).state is State.RETURNING
    first = after(UP, Event.CONNECT_FAILED)
    assert after(first, Event.PROBE_OK_NEEDED).state is State.RETURNING


def test_an_ejected_endpoint_whose_connections_fail_is_unreachable_from_then_on() -> None:
    ejected = after(UP, *[Event.FAILED] * 3)
    assert not is_unreachable(ejected)
    lost = after(ejected, Event.CONNECT_FAILED, now=0.5)
    assert is_unreachable(lost)
    assert (lost.since, lost.until, lost.ejections) == (ejected.since, ejected.until, 1)
    assert after(lost, Event.CONNECT_FAILED) is lost


def test_an_endpoint_is_proven_until_a_failure_and_again_after_a_success() -> None:
    assert is_proven(UP)
    assert not is_proven(after(UP, Event.FAILED))
    assert is_proven(after(UP, Event.FAILED, Event.SUCCEEDED))
    returning = after(after(UP, Event.CONNECT_FAILED), Event.PROBE_OK, now=1.0)
    assert not is_proven(returning), "a probe is no answer"
    assert is_proven(after(returning, Event.SUCCEEDED))


def test_a_newcomer_that_never_answered_a_probe_says_so() -> None:
    newcomer = Health(State.EJECTED, 3.0, until=3.0)
    assert after(newcomer, Event.PROBE_FAILED, now=3.0).cause is Event.PROBE_FAILED


def test_a_flapping_endpoint_is_ejected_less_than_once_a_minute_in_the_long_run() -> None:
    """Up two seconds, down two seconds, probed every second: F12."""
    health, ejections = UP, []
    for now in range(3600):
        down = now % 4 >= 2
        before = health.state
        if probe_due(health, now):
            health = after(health, Event.PROBE_FAILED if down else Event.PROBE_OK, now=now)
        if health.state in (State.UP, State.RETURNING):
            health = after(health, Event.CONNECT_FAILED if down else Event.SUCCEEDED, now=now)
        if health.state is State.EJECTED and before is not State.EJECTED:
            ejections.append(now)
    late = [moment for moment in ejections if moment > 300]
    assert len(late) <= 3300 / 60
    assert len(ejections) - len(late) <= 9  # 1 + 2 + 4 ... + 256 s


def test_a_minute_without_an_ejection_is_forgiven() -> None:
    returned = after(
        after(after(UP, Event.CONNECT_FAILED), Event.PROBE_OK, now=1.0),
        *[Event.SUCCEEDED] * 3,
        now=2.0,
    )
    assert after(returned, Event.SUCCEEDED, now=61.0).ejections == 1
    assert after(returned, Event.SUCCEEDED, now=62.0).ejections == 0


def test_jitter_spreads_returns() -> None:
    lengths = {
        advance(UP, Event.CONNECT_FAILED, 0.0, Random(seed), HealthLimits()).until
        for seed in range(50)
    }
    assert len(lengths) == 50
    assert all(0.8 <= length <= 1.2 for length in lengths)


def test_an_engine_that_reports_dead_is_dead_in_any_state() -> None:
    for state in (State.UP, State.RETURNING, State.EJECTED):
        assert after(Health(state), Event.ENGINE_DEAD).state is State.DEAD
    assert after(Health(State.DEAD, until=5.0), Event.PROBE_OK, now=5.0).state is State.RETURNING


def test_passive_evidence_ejects_half_a_pool_at_most() -> None:
    out = [Health(State.EJECTED, until=float(number)) for number in range(4)]
    assert available(out, LIMITS) == [True, True, False, False]
    assert available([*out, UP, UP, UP, UP], LIMITS) == [False] * 4 + [True] * 4


def test_the_last_living_endpoint_is_never_ejected() -> None:
    out = Health(State.EJECTED, until=9.0)
    assert available([out], LIMITS) == [True]
    assert available([out, Health(State.DEAD), Health(State.DEAD)], LIMITS) == [True, False, False]
    assert available([out, out], LIMITS).count(True) == 1


def test_no_rule_of_a_pool_brings_back_an_endpoint_that_refuses_connections() -> None:
    refused = after(UP, Event.CONNECT_FAILED)
    assert available([refused] * 7 + [UP], LIMITS) == [False] * 7 + [True]
    assert available([refused] * 3, LIMITS) == [False] * 3
    failing = Health(State.EJECTED, until=9.0, cause=Event.FAILED)
    assert available([refused, refused, failing], LIMITS) == [False, False, True]


def test_all_dead_is_all_dead() -> None:
    assert available([Health(State.DEAD)] * 3, LIMITS) == [False] * 3
    assert available([], LIMITS) == []


def test_every_state_answers_every_event() -> None:
    for state, event in product(State, Event):
        assert after(Health(state), event).state in State
