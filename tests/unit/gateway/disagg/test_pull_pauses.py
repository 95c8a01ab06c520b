"""Tests of the pauses after failed pulls."""

from __future__ import annotations

from gateway.disagg.pull_pauses import LONGEST_PAUSE_S, PullPauses


def test_each_failure_doubles_the_pause_of_its_source_alone() -> None:
    pauses, now = PullPauses(), 100.0
    for length_s in (1.0, 2.0, 4.0, 8.0):
        assert "p" not in pauses.paused(now)
        pauses.on_failed("p", now)
        assert "p" in pauses.paused(now + length_s - 0.01)
        assert "q" not in pauses.paused(now)
        now += length_s
    for _ in range(9):
        pauses.on_failed("p", now)
        now += LONGEST_PAUSE_S
        assert "p" not in pauses.paused(now)
    pauses.on_failed("p", now)
    assert "p" in pauses.paused(now + LONGEST_PAUSE_S - 0.01)


def test_pulls_that_began_before_a_pause_do_not_lengthen_it() -> None:
    pauses = PullPauses()
    for now in (100.0, 100.1, 100.9):
        pauses.on_failed("p", now)
    assert "p" not in pauses.paused(101.0)


def test_a_source_that_serves_a_pull_begins_with_a_short_pause_again() -> None:
    pauses = PullPauses()
    pauses.on_failed("p", 100.0)
    pauses.on_failed("p", 102.0)
    pauses.forget("p")
    assert "p" not in pauses.paused(102.0)
    pauses.on_failed("p", 103.0)
    assert "p" not in pauses.paused(104.0)


def test_an_engine_that_cannot_serve_pulls_pauses_for_long_at_once() -> None:
    pauses = PullPauses()
    pauses.on_failed("p", 100.0)
    pauses.on_failed("p", 100.5, is_final=True)
    pauses.on_failed("p", 101.0)
    assert "p" in pauses.paused(100.4 + LONGEST_PAUSE_S)
    assert "p" not in pauses.paused(100.5 + LONGEST_PAUSE_S)
