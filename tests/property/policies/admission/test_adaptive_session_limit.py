"""Property tests of gateways that exchange which sessions are active.

After the exchange, all of them count the same number of context tokens.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.admission.adaptive_session_limit import SessionGate, SessionUpdate, WorkingSet

SERVED = st.tuples(
    st.integers(0, 2),
    st.sampled_from("abcdefgh"),
    st.integers(1, 5000),
    st.floats(0.01, 20.0),
    st.booleans(),
)


def sharing(gate: SessionGate | None = None) -> WorkingSet:
    made = WorkingSet(gate)
    made.set_key_function(ord)
    return made


def tell(sets: list[WorkingSet], now: float) -> None:
    messages = [working_set.take_updates(now) for working_set in sets]
    for index, working_set in enumerate(sets):
        for other, members in enumerate(messages):
            if other != index:
                working_set.apply_peer_sessions(members, 0.0, now)


@given(st.lists(SERVED, min_size=1, max_size=60))
def test_all_count_the_contexts_that_were_seen_last_wherever_that_was(
    served: list[tuple[int, str, int, float, bool]],
) -> None:
    sets, now, last = [sharing() for _ in range(3)], 1000.0, dict[str, tuple[float, int]]()
    for index, session, tokens, gap_s, told in served:
        now += gap_s
        sets[index].on_reserved(session, tokens, 0, 0, now)
        sets[index].on_ended(session, tokens, 0, now)
        last[session] = now, tokens
        if told:
            tell(sets, now)
    tell(sets, now)
    wanted = {
        session: tokens
        for session, (seen_s, tokens) in last.items()
        if seen_s + sets[0].memory_s > now
    }
    for working_set in sets:
        assert {session for session in last if working_set.contains(session)} >= wanted.keys()
        assert working_set.tokens == sum(
            last[session][1] for session in last if working_set.contains(session)
        )
    assert sets[0].can_admit("z", 1, 10.0) == sets[1].can_admit("z", 1, 10.0)


def test_sessions_of_peers_are_bounded_like_own_ones() -> None:
    inside = sharing(SessionGate(remembered=100))
    for number in range(500):
        inside.apply_peer_sessions([SessionUpdate(number, 10, 0.0)], 0.0, 1000.0 + number / 1000)
    inside.tick(1001.0)
    assert len(inside) == 50
    assert inside.tokens == 500


def test_pending_updates_never_exceed_the_active_sessions() -> None:
    inside = WorkingSet(SessionGate(remembered=100))
    inside.set_key_function(int)
    for number in range(500):
        inside.on_reserved(str(number), 10, 0, 0, number / 1000)
        inside.on_ended(str(number), 20, 0, number / 1000)
        inside.tick(number / 1000)
    assert len(inside.take_updates(1.0)) == len(inside) <= 51


def test_an_answer_that_takes_longer_than_a_session_is_remembered_keeps_it_in_everywhere() -> None:
    sets = [sharing(), sharing()]
    sets[0].on_reserved("a", 100, 0, 0, 0.0)
    for now in (1.0, 100.0, 182.0, 300.0, 364.0, 500.0):
        for working_set in sets:
            working_set.tick(now)
        tell(sets, now)
        assert sets[1].tokens == 100
