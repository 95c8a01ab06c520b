"""Property tests of the record of an engine's running answers.

After any events, it contains exactly the answers that have begun and not ended.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine.running_answer_lengths import LEAST_TOKENS
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
        groups = load.timeline.answer_groups(load, now)
        assert sum(count for count, _, _ in groups) == pytest.approx(load.answers)
        assert all(0.0 < per_token <= 1.0 / LEAST_TOKENS for _, per_token, _ in groups)
        assert all(began_s <= load.timeline.prefill_s + 1e-6 for _, _, began_s in groups)
