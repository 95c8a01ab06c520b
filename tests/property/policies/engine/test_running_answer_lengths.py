"""Property tests of the record of answers that are being generated.

After any events, it contains exactly these answers.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine.running_answer_lengths import is_short
from policies.load_ledger import LoadReservation
from tests.unit.policies.builders import ask

events = st.lists(
    st.tuples(
        st.sampled_from(("send", "token", "end", "fail")),
        st.integers(0, 9),
        st.floats(0.0, 20.0),
        st.integers(1, 900),
    ),
    max_size=60,
)


@given(events)
def test_the_groups_count_every_answer_once_whatever_happens(
    events: list[tuple[str, int, float, int]],
) -> None:
    load, now = EndpointLoad(0), 100.0
    running: list[LoadReservation] = []
    for event, index, passed_s, tokens in events:
        now += passed_s
        if event == "send":
            running.append(load_ledger.reserve(load, ask(2000, tokens).request, 0, now))
        elif running:
            chosen = running[index % len(running)]
            if event == "token":
                chosen.on_first_token(now)
            else:
                chosen.finish(now, tokens if event == "end" else None)
                running.remove(chosen)
        groups, answers = load.timeline.answer_groups(load, now), load.timeline.answers
        assert sum(group[0] for group in groups) == pytest.approx(load.answers)
        assert all(group[2] <= load.timeline.prefill_s + 1e-6 for group in groups)
        for group in groups:
            parts = list(answers.length_groups(group))
            assert sum(count for count, _, _ in parts) == pytest.approx(group[0])
            assert is_short(group) or all(0.0 < each <= 1.0 / 16.0 for _, each, _ in parts)
            assert is_short(group) or not group[8]
            assert sum(count for count, _, _ in group[8]) <= group[0] * (1.0 + 1e-9)
            assert all(1.0 <= left <= total for _, total, left in group[8])
