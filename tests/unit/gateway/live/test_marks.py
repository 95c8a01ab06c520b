"""Between two notes: rates, and a minute's worth of memory."""

from __future__ import annotations

import itertools

from gateway.live.marks import HISTORY_S, Marks, rise
from tests.unit.gateway.live.empty import mark


def test_rise_is_what_has_grown() -> None:
    assert rise({"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 1.0}) == {"a": 2.0, "c": 2.0}


def test_a_minute_is_kept_and_notes_too_close_are_not() -> None:
    marks = Marks()
    for step in range(400):
        marks.keep(mark(at=step * 0.5))
    kept = [each.at for each in marks]
    assert kept[-1] - kept[0] <= HISTORY_S
    assert all(later - earlier >= 0.95 for earlier, later in itertools.pairwise(kept))
    assert len(kept) == 62


def test_the_note_to_compare_with_is_the_youngest_that_is_old_enough() -> None:
    marks = Marks()
    assert marks.before(5.0, 10.0) is None
    for at in (0.0, 5.0, 10.0, 15.0):
        marks.keep(mark(at=at))
    old, oldest = marks.before(21.0, 10.0), marks.before(21.0, 60.0)
    assert (old and old.at, oldest and oldest.at) == (10.0, 0.0)
