"""Tests that clocks make scheduled calls in order, never too early, and not after a
cancellation.
"""

from __future__ import annotations

import threading

import pytest

from kvtransfer.util.clock import ThreadClock, VirtualClock


def test_virtual_time_passes_only_in_run() -> None:
    clock, calls = VirtualClock(), []
    for when in (3.0, 1.0, 2.0, 1.0):
        clock.call_at(when, lambda when=when: calls.append((when, clock.now())))  # type: ignore[misc]
    assert (clock.now(), calls) == (0.0, [])
    assert clock.run(2.0)
    assert calls == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0)]
    assert clock.now() == 2.0


def test_virtual_time_stops_when_it_has_come_true() -> None:
    clock, calls = VirtualClock(), []
    for when in (1.0, 2.0, 3.0):
        clock.call_at(when, lambda when=when: calls.append(when))  # type: ignore[misc]
    assert clock.run(10, lambda: 2.0 in calls)
    assert (clock.now(), calls) == (2.0, [1.0, 2.0])
    assert not clock.run(0.5, lambda: False)
    assert clock.now() == 2.5


def test_a_call_for_a_past_time_is_made_now() -> None:
    clock, calls = VirtualClock(), []
    clock.run(5)
    clock.call_at(1.0, lambda: calls.append(clock.now()))
    clock.run_in_thread(lambda: calls.append(clock.now()))
    clock.run(0)
    assert calls == [5.0, 5.0]


def test_a_cancelled_call_is_not_made() -> None:
    clock, calls = VirtualClock(), []
    clock.call_at(1.0, lambda: calls.append(1)).cancel()
    clock.run(2)
    assert calls == []


def test_the_thread_keeps_the_order_of_time_and_of_asking() -> None:
    clock, calls, done = ThreadClock(), [], threading.Event()
    now = clock.now()
    clock.call_at(now + 0.03, done.set)
    for name, when in (("c", 0.02), ("a", 0.01), ("b", 0.01)):
        clock.call_at(now + when, lambda name=name: calls.append((name, clock.now() >= now + 0.01)))  # type: ignore[misc]
    assert done.wait(10)
    assert calls == [("a", True), ("b", True), ("c", True)]
    clock.close()


def test_an_earlier_call_wakes_the_thread_before_a_later_one() -> None:
    clock, done = ThreadClock(), threading.Event()
    late = clock.call_at(clock.now() + 3600, lambda: None)
    clock.call_at(clock.now(), done.set)
    assert done.wait(10)
    late.cancel()
    clock.close()


def test_a_failing_call_does_not_stop_later_calls(caplog: pytest.LogCaptureFixture) -> None:
    clock, done = ThreadClock(), threading.Event()
    clock.call_at(clock.now(), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    clock.call_at(clock.now(), done.set)
    assert done.wait(10)
    assert "kv: a call scheduled by the clock failed" in caplog.text
    clock.close()


def test_a_closed_clock_makes_no_call_and_leaves_no_thread() -> None:
    before, clock, calls = set(threading.enumerate()), ThreadClock(), []
    clock.call_at(clock.now() + 3600, lambda: calls.append(1))
    clock.close()
    clock.call_at(clock.now(), lambda: calls.append(2))
    assert set(threading.enumerate()) == before
    assert calls == []


def test_the_thread_may_close_its_own_clock() -> None:
    clock, done = ThreadClock(), threading.Event()

    def leave() -> None:
        clock.close()
        done.set()

    clock.call_at(clock.now(), leave)
    assert done.wait(10)
