"""Tests of limiting the number of active sessions: which count, and how many are too many."""

from __future__ import annotations

import pytest

from policies.admission.adaptive_session_limit import (
    SessionGate,
    WorkingSet,
    fleet_kv_tokens,
    is_continuation,
)
from policies.routing_types import Candidate, SessionHints
from tests.unit.policies.builders import candidate


def full(now: float = 0.0, sessions: int = 7) -> WorkingSet:
    inside = WorkingSet()
    for number in range(sessions):
        inside.on_reserved(f"s{number}", 90, 0, 0, now + number)
        inside.on_ended(f"s{number}", 100, 0, now + number + 0.5)
    return inside


def test_a_new_session_enters_while_contexts_fit_and_an_active_one_always() -> None:
    inside = full(sessions=6)
    assert inside.tokens == 600
    assert inside.can_admit("new", 100, 1000.0)
    assert not inside.can_admit("new", 101, 1000.0)
    assert inside.can_admit("s3", 500, 1000.0)


def test_nothing_is_refused_with_unknown_memory_or_without_sessions() -> None:
    assert full().can_admit("new", 10_000, None)
    assert WorkingSet().can_admit("new", 10_000, 1000.0)
    assert full().can_admit("", 10_000, 1000.0)


def test_a_session_counts_as_long_as_its_context_is_and_until_it_was_silent_for_long() -> None:
    inside = full(sessions=2)
    inside.on_reserved("s0", 150, 100, 100, 10.0)
    inside.on_ended("s0", 170, 100, 12.0)
    assert inside.tokens == 270
    inside.tick(1.5 + 180.0)
    assert (inside.tokens, inside.contains("s0"), inside.contains("s1")) == (170, True, False)
    inside.tick(12.0 + 180.0)
    assert (inside.tokens, len(inside)) == (0, 0)


def test_a_session_with_an_answer_under_way_is_not_forgotten() -> None:
    inside = WorkingSet()
    inside.on_reserved("long", 100, 0, 0, 0.0)
    inside.tick(1000.0)
    assert inside.contains("long")
    inside.on_ended("long", None, None, 1001.0)
    inside.tick(1181.5)
    assert not inside.contains("long")


def test_memory_follows_the_times_after_which_sessions_return() -> None:
    slow, quick = WorkingSet(), WorkingSet()
    for turn in range(200):
        slow.on_reserved("s", 100, 100, 100, turn * 400.0)
        slow.on_ended("s", 100, 100, turn * 400.0 + 1)
        slow.tick(turn * 400.0 + 390)
        quick.on_reserved("s", 100, 100, 100, turn * 5.0)
        quick.on_ended("s", 100, 100, turn * 5.0 + 1)
    assert 390 < slow.memory_s <= 600
    assert 60 <= quick.memory_s < 180


def test_what_continuing_sessions_find_evicted_makes_the_share_smaller_and_finding_all_larger() -> (
    None
):
    lost = full()
    for turn in range(20):
        now = 20.0 + 20 * turn
        for number in range(7):
            lost.on_reserved(f"s{number}", 100, 50, 50, now)
            lost.on_ended(f"s{number}", 100, 50, now + 1)
        lost.tick(now + 2)
    assert lost.memory_share == 0.5
    result = full()
    for turn in range(60):
        now = 20.0 + 20 * turn
        for number in range(7):
            result.on_reserved(f"s{number}", 100, 100, 100, now)
            result.on_ended(f"s{number}", 100, 100, now + 1)
        result.can_admit("new", 1000, 1000.0)  # another session was refused
        result.tick(now + 2)
    assert result.memory_share == pytest.approx(0.9)


def test_an_engine_that_found_less_than_was_believed_has_evicted_it() -> None:
    inside = full()
    for turn in range(20):
        now = 20.0 + 20 * turn
        inside.on_reserved("s0", 100, 100, 100, now)
        inside.on_ended("s0", 100, 20, now + 1)
        inside.tick(now + 2)
    assert inside.memory_share == 0.5


def test_how_long_until_a_session_may_enter_comes_from_those_that_have_left() -> None:
    inside = full(sessions=20)
    assert inside.seconds_until_room(100, 1000.0, 30.0) is None
    inside.tick(190.5)  # by now, ten sessions have expired
    seconds = inside.seconds_until_room(100, 1000.0, 191.0)
    assert seconds is not None
    assert seconds > 0


def test_memory_is_bounded_whatever_comes() -> None:
    inside = WorkingSet(SessionGate(remembered=100))
    for number in range(1000):
        inside.on_reserved(f"s{number}", 10, 0, 0, float(number) / 100)
        inside.tick(number / 100)
    assert len(inside) <= 50
    assert inside.tokens == 10 * len(inside)
    inside.on_ended("s1", 20, 0, 11.0)  # expired in the meantime
    assert inside.tokens == 10 * len(inside)


def test_a_conversation_without_a_key_is_recognized_by_its_cache() -> None:
    assert is_continuation(1000, 500)
    assert not is_continuation(1000, 499)


def test_the_fleets_memory_is_known_when_everybodys_is() -> None:
    known = [
        candidate(0, kv_tokens=100.0),
        candidate(1, kv_tokens=50.0),
        candidate(2, is_available=False),
    ]
    assert fleet_kv_tokens(known) == 150.0
    assert fleet_kv_tokens([*known, candidate(3)]) is None
    assert fleet_kv_tokens([]) is None


def test_the_end_of_a_session_frees_its_memory_at_once() -> None:
    inside = full(sessions=7)
    assert not inside.can_admit("new", 100, 1000.0)
    inside.apply_hints("s3", SessionHints(is_last=True), 8.0)
    assert (inside.tokens, inside.contains("s3")) == (600, False)
    assert inside.can_admit("new", 100, 1000.0)


def test_a_session_ends_with_the_last_of_its_requests_in_flight() -> None:
    inside = WorkingSet()
    inside.on_reserved("s", 100, 0, 0, 0.0)
    inside.on_reserved("s", 100, 0, 0, 0.0)
    inside.on_ended("s", 110, 0, 1.0)
    inside.apply_hints("s", SessionHints(is_last=True), 1.0)
    assert inside.contains("s")
    inside.on_ended("s", 120, 0, 2.0)
    assert (inside.tokens, inside.contains("s")) == (0, False)


def test_a_session_that_goes_on_after_its_last_request_counts_again() -> None:
    inside = WorkingSet()
    inside.on_reserved("s", 100, 0, 0, 0.0)
    inside.on_reserved("s", 100, 0, 0, 0.0)
    inside.on_ended("s", 110, 0, 1.0)
    inside.apply_hints("s", SessionHints(is_last=True), 1.0)
    inside.on_reserved("s", 130, 0, 0, 1.5)
    inside.on_ended("s", 110, 0, 2.0)
    inside.on_ended("s", 140, 0, 3.0)
    assert (inside.tokens, inside.contains("s")) == (140, True)


def test_hints_about_an_unknown_session_change_nothing() -> None:
    inside = full(sessions=2)
    inside.apply_hints("other", SessionHints(True, 5.0), 3.0)
    assert inside.tokens == 200


@pytest.mark.parametrize(("keep_s", "counts_until_s"), [(5.0, 6.0), (400.0, 401.0), (9e9, 601.0)])
def test_a_session_counts_for_as_long_as_its_client_asks(
    keep_s: float, counts_until_s: float
) -> None:
    inside = WorkingSet()
    for name in ("hinted", "plain"):
        inside.on_reserved(name, 100, 0, 0, 0.0)
        inside.on_ended(name, 100, 0, 1.0)
    inside.apply_hints("hinted", SessionHints(keep_s=keep_s), 1.0)
    inside.tick(counts_until_s - 0.1)
    assert inside.contains("hinted")
    assert inside.contains("plain") == (counts_until_s < 181.0)
    inside.tick(counts_until_s + 0.1)
    assert not inside.contains("hinted")


def test_sessions_that_are_kept_for_long_do_not_hide_idle_ones() -> None:
    inside = full(sessions=4)
    inside.apply_hints("s0", SessionHints(keep_s=500.0), 4.0)
    inside.tick(184.0)
    assert [inside.contains(f"s{number}") for number in range(4)] == [True, False, False, False]
    assert inside.tokens == 100


def test_other_gateways_learn_that_a_session_has_ended() -> None:
    here, there = WorkingSet(), WorkingSet()
    for inside in (here, there):
        inside.set_key_function(len)
    here.on_reserved("one", 100, 0, 0, 0.0)
    here.on_ended("one", 120, 0, 1.0)
    there.apply_peer_sessions(here.take_updates(1.0), 0.0, 1.0)
    assert there.tokens == 120
    here.apply_hints("one", SessionHints(is_last=True), 2.0)
    updates = here.take_updates(2.0)
    there.apply_peer_sessions(updates, 0.0, 2.0)
    assert (there.tokens, there.contains("one")) == (0, False)
    assert here.take_updates(3.0) == []


EVIDENCE = SessionGate(start=None)


def fleet(waiting: int) -> list[Candidate]:
    members = [candidate(slot) for slot in range(2)]
    for member in members:
        member.load.kv_tokens, member.load.waiting = 500, waiting
    return members


def returning(lost: int, waiting: int, sessions: WorkingSet | None = None) -> WorkingSet:
    """Return a state in which each session has returned twice and lost part of its cached context.

    lost      evicted tokens of the 100 tokens of each context
    waiting   number of prompts that wait at the engines
    sessions  number of sessions
    """
    inside = sessions or WorkingSet(EVIDENCE)
    for turn in range(3):
        for number in range(8):
            now = 60.0 * turn + number
            inside.on_reserved(f"s{number}", 100, 100 - lost, 0, now)
            inside.on_ended(f"s{number}", 100, None, now + 0.5)
        for tenth in range(100, 600):
            inside.tick(60.0 * turn + tenth / 10, fleet(waiting))
    return inside


def test_sessions_are_limited_once_lost_contexts_make_prompts_queue() -> None:
    assert not WorkingSet(EVIDENCE).is_limited
    inside = returning(lost=40, waiting=5)
    assert inside.is_limited
    assert not inside.can_admit("new", 100, 1000.0)
    assert inside.can_admit("s3", 100, 1000.0)


@pytest.mark.parametrize(("lost", "waiting"), [(40, 0), (40, 1), (0, 5)])
def test_neither_lost_contexts_nor_queues_alone_limit_sessions(lost: int, waiting: int) -> None:
    inside = returning(lost, waiting)
    assert not inside.is_limited
    assert inside.can_admit("new", 10_000, 1000.0)


def test_sessions_are_not_limited_while_contexts_fill_less_than_half_of_the_memory() -> None:
    inside = WorkingSet(EVIDENCE)
    roomy = fleet(5)
    for member in roomy:
        member.load.kv_tokens = 5000
    for turn in range(3):
        inside.on_reserved("s", 100, 20, 0, 60.0 * turn)
        inside.on_ended("s", 100, None, 60.0 * turn + 0.5)
        for second in range(59):
            inside.tick(60.0 * turn + second, roomy)
    assert not inside.is_limited


def test_a_limit_ends_once_nothing_queues_and_no_session_was_refused() -> None:
    inside = returning(lost=40, waiting=5)
    for second in range(200, 400):
        inside.tick(float(second), fleet(0))
    assert not inside.is_limited


def test_a_limit_that_refuses_sessions_of_an_idle_fleet_is_raised_until_they_fit() -> None:
    inside = returning(lost=40, waiting=5)
    for second in range(200, 600):
        inside.on_reserved("s0", 100, 60, 0, float(second))
        inside.on_ended("s0", 100, None, second + 0.5)
        if inside.can_admit("new", 700, 1000.0):
            return
        inside.tick(float(second), fleet(0))
    pytest.fail(f"a session is still refused: {inside.memory_share}")


def test_a_limit_lets_a_session_in_now_and_then_while_no_prompt_waits() -> None:
    inside = returning(lost=40, waiting=5)
    assert not inside.can_enter_beyond(fleet(waiting=1), 200.0)
    entered = [now for now in range(200, 220) if inside.can_enter_beyond(fleet(0), float(now))]
    assert entered == list(range(200, 220)), "two endpoints: one session each second"
    assert not inside.can_enter_beyond(fleet(0), 219.5)
    assert not WorkingSet().can_enter_beyond(fleet(0), 200.0), "priced has a limit of another kind"
