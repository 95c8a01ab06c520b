"""Tests of leases, which keep offered KV: which events are allowed in which state."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.lease import (
    TERMINAL,
    TRANSITIONS,
    Lease,
    LeaseError,
    LeaseEvent,
    LeaseState,
    advance,
)


def walked(*events: LeaseEvent, now: float = 0.0) -> Lease:
    lease = Lease("a", deadline=10.0)
    for event in events:
        lease = advance(lease, event, now)
    return lease


def test_the_good_path_ends_released() -> None:
    lease = walked(LeaseEvent.CLAIM, LeaseEvent.START, LeaseEvent.LAND, LeaseEvent.RELEASE)
    assert lease.state is LeaseState.RELEASED


@pytest.mark.parametrize(
    ("state", "event"), sorted(set(product(LeaseState, LeaseEvent)) - TRANSITIONS.keys())
)
def test_transitions_outside_the_table_are_refused(state: LeaseState, event: LeaseEvent) -> None:
    with pytest.raises(LeaseError, match=f"event {event} is not allowed .* state {state}"):
        advance(Lease("a", 10.0, state), event, 0.0)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_an_end_is_an_end(state: LeaseState) -> None:
    assert not [event for event in LeaseEvent if (state, event) in TRANSITIONS]


def test_late_events_are_illegal_even_before_the_timer_fires() -> None:
    with pytest.raises(LeaseError, match=r"claim is not allowed .* expired 0\.500 s ago"):
        walked(LeaseEvent.CLAIM, now=10.5)
    with pytest.raises(LeaseError, match="expired"):
        advance(walked(LeaseEvent.CLAIM), LeaseEvent.RENEW, 11.0, deadline=20.0)


def test_releasing_late_is_still_releasing() -> None:
    landed = walked(LeaseEvent.CLAIM, LeaseEvent.START, LeaseEvent.LAND)
    assert advance(landed, LeaseEvent.RELEASE, 99.0).state is LeaseState.RELEASED


def test_nothing_expires_early() -> None:
    with pytest.raises(LeaseError, match=r"10\.000 s are left"):
        walked(LeaseEvent.EXPIRE)
    assert walked(LeaseEvent.EXPIRE, now=10.0).state is LeaseState.EXPIRED


def test_a_heartbeat_moves_the_deadline_forward_only() -> None:
    assert advance(walked(LeaseEvent.CLAIM), LeaseEvent.RENEW, 5.0, deadline=30.0).deadline == 30.0
    for deadline in (None, 9.0):
        with pytest.raises(LeaseError, match="later deadline"):
            advance(walked(LeaseEvent.CLAIM), LeaseEvent.RENEW, 5.0, deadline)


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ((), LeaseState.OFFERED),
        ((LeaseEvent.CLAIM,), LeaseState.CLAIMED),
        ((LeaseEvent.CLAIM, LeaseEvent.START), LeaseState.MOVING),
    ],
)
def test_an_ended_lease_records_the_state_it_ended_from(
    before: tuple[LeaseEvent, ...], left: LeaseState
) -> None:
    assert advance(walked(*before), LeaseEvent.REVOKE, 1.0).ended_from is left
    assert advance(walked(*before), LeaseEvent.EXPIRE, 10.0).ended_from is left


@given(st.lists(st.tuples(st.sampled_from(LeaseEvent), st.floats(0, 4)), max_size=20))
def test_no_history_moves_bytes_after_the_deadline_or_leaves_an_end(
    history: list[tuple[LeaseEvent, float]],
) -> None:
    lease, now = Lease("a", deadline=10.0), 0.0
    for event, passed in history:
        now += passed
        before = lease
        try:
            lease = advance(lease, event, now, deadline=before.deadline + 1.0)
        except LeaseError:
            continue
        assert before.state not in TERMINAL
        assert TRANSITIONS[before.state, event] is lease.state
        if lease.state in (LeaseState.CLAIMED, LeaseState.MOVING, LeaseState.LANDED):
            assert now < before.deadline
