"""Tests that Python switches threads more often while KV moves, and as before afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from kvtransfer.transports import switch_interval
from kvtransfer.transports.switch_interval import SwitchInterval, SwitchIntervalHold

USUAL_S, SHORT_S = 0.004, 0.0001


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[SwitchInterval]:
    # Return a new object, because links of other tests may use that of the process.
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    fresh = SwitchInterval()
    monkeypatch.setattr(switch_interval, "SWITCH_INTERVAL", fresh)
    yield fresh
    sys.setswitchinterval(before)


def now_s() -> float:
    return round(sys.getswitchinterval(), 6)


def test_the_interval_is_short_until_the_last_holder_restores_it(interval: SwitchInterval) -> None:
    interval.shorten(SHORT_S)
    interval.shorten(SHORT_S)
    interval.restore()
    assert now_s() == SHORT_S
    interval.restore()
    assert now_s() == USUAL_S


def test_an_interval_that_is_shorter_already_is_left_alone(interval: SwitchInterval) -> None:
    sys.setswitchinterval(0.00005)
    interval.shorten(SHORT_S)
    assert now_s() == 0.00005
    interval.restore()
    assert now_s() == 0.00005


def test_an_interval_that_the_application_sets_meanwhile_stays(interval: SwitchInterval) -> None:
    interval.shorten(SHORT_S)
    sys.setswitchinterval(0.002)
    interval.restore()
    assert now_s() == 0.002
    interval.shorten(SHORT_S)
    interval.restore()
    assert now_s() == 0.002


def test_a_link_holds_the_interval_once_however_often_it_takes_it(interval: SwitchInterval) -> None:
    hold = SwitchIntervalHold(SHORT_S)
    hold.take()
    hold.take()
    assert (hold.is_held, now_s()) == (True, SHORT_S)
    hold.drop()
    hold.drop()
    assert (hold.is_held, now_s()) == (False, USUAL_S)


def test_an_interval_of_zero_changes_nothing(interval: SwitchInterval) -> None:
    hold = SwitchIntervalHold(0.0)
    hold.take()
    assert (hold.is_held, now_s()) == (False, USUAL_S)


def test_a_hold_of_a_link_that_has_ended_is_never_taken_again(interval: SwitchInterval) -> None:
    hold = SwitchIntervalHold(SHORT_S)
    hold.take()
    hold.close()
    hold.take()
    assert (hold.is_held, now_s()) == (False, USUAL_S)


def test_a_forked_child_has_the_applications_interval(interval: SwitchInterval) -> None:
    os.register_at_fork(after_in_child=interval.restore_after_fork)
    interval.shorten(SHORT_S)
    child = os.fork()
    if not child:
        os._exit(now_s() != USUAL_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert now_s() == SHORT_S
    interval.restore()
