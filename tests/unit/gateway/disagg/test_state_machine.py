"""Tests that each state of a split request says what ends it, and how long it may last."""

from __future__ import annotations

import pytest

from gateway.disagg.pair_attempt import _ROWS
from gateway.disagg.state_machine import END_STATES, LIVE_STATES, TABLE, Act, Event, State

LIVE = sorted(LIVE_STATES)


@pytest.mark.parametrize("state", LIVE)
def test_every_state_has_an_owner_and_a_deadline_and_leads_somewhere(state: State) -> None:
    assert len(LIVE_STATES[state]) == 2
    assert any(from_state is state for from_state, _ in TABLE)


@pytest.mark.parametrize("state", sorted(END_STATES))
def test_end_states_have_no_transitions(state: State) -> None:
    assert not any(from_state is state for from_state, _ in TABLE)


@pytest.mark.parametrize("state", sorted(END_STATES))
def test_no_event_leaves_an_end_state(state: State) -> None:
    assert _ROWS[state] == dict.fromkeys(Event, (state, None, ()))


def test_every_event_and_every_action_is_used() -> None:
    assert {event for _, event in TABLE} == set(Event)
    assert {act for row in TABLE.values() for act in row.acts} == set(Act)


def test_every_state_is_reachable_and_reaches_an_end() -> None:
    assert {row.state for row in TABLE.values()} | {State.RESERVED} == set(State)
    ending = set(END_STATES)
    for _ in State:
        ending |= {from_state for (from_state, _), row in TABLE.items() if row.state in ending}
    assert ending == set(State)


@pytest.mark.parametrize("state", [state for state in LIVE if state is not State.RESERVED])
def test_a_disconnect_in_any_state_closes_every_open_leg(state: State) -> None:
    row = TABLE[state, Event.CLIENT_GONE]
    assert row.state is State.GONE
    closes = {
        Act.LEAVE_QUERY,
        Act.CLOSE_PREFILL,
        Act.ABORT_PREFILL,
        Act.CLOSE_DECODE,
        Act.FREE_BY_DECODE,
    }
    closes &= set(row.acts)
    assert len(closes) == (2 if state in (State.PAIRED, State.DECODING) else 1)


def test_kv_under_a_lease_is_freed_in_every_path_that_does_not_read_it() -> None:
    for state in (State.PAIRED, State.HANDED_OVER, State.TRANSFERRING):
        assert Act.FREE_BY_DECODE in TABLE[state, Event.CLIENT_GONE].acts
    assert TABLE[State.PREFILLING, Event.CLIENT_GONE].acts == (Act.ABORT_PREFILL,)
    for state, event in [
        (State.HANDED_OVER, Event.NO_OTHER_DECODE),
        (State.TRANSFERRING, Event.DECODE_BROKE),
        (State.TRANSFERRING, Event.UNREACHED),
    ]:
        assert TABLE[state, event].acts[-1] is Act.FREE_ELSEWHERE


def test_the_other_leg_of_a_broken_pair_is_closed_and_only_the_broken_one_is_blamed() -> None:
    for event, guilty, twin in [
        (Event.PREFILL_BROKE, Act.BLAME_PREFILL, Act.CLOSE_DECODE),
        (Event.DECODE_BROKE, Act.BLAME_DECODE, Act.CLOSE_PREFILL),
        (Event.UNREACHED, Act.BLAME_DECODE, Act.CLOSE_PREFILL),
    ]:
        assert TABLE[State.PAIRED, event].acts == (twin, guilty)
    for (_, event), row in TABLE.items():
        blamed = {Act.BLAME_PREFILL, Act.BLAME_DECODE} & set(row.acts)
        if event is Event.PREFILL_BROKE:
            assert blamed == {Act.BLAME_PREFILL}
        elif event in (Event.DECODE_BROKE, Event.UNREACHED):
            assert blamed == {Act.BLAME_DECODE}
