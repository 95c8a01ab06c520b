"""Tests that a connection's thread stops polling for a while if other threads want its core."""

from __future__ import annotations

from kvtransfer.transports.stream.spin_pause import SpinPause


def test_a_short_look_pauses_nothing() -> None:
    pause = SpinPause()
    assert not pause.is_contended(1.0, 1.00002)
    assert pause.is_over(1.00002)


def test_pauses_double_while_the_core_stays_contended_and_have_a_maximum() -> None:
    pause, now_s, pauses = SpinPause(), 1.0, []
    for _ in range(12):
        assert pause.is_contended(now_s, now_s + 0.003)
        begin_s = now_s = now_s + 0.003
        while not pause.is_over(now_s):
            now_s += 0.0005
        pauses.append(round(now_s - begin_s, 3))
    assert pauses[:4] == [0.001, 0.002, 0.004, 0.008]
    assert pauses[-1] == 0.512


def test_an_undisturbed_spin_makes_the_next_pause_short_again() -> None:
    pause = SpinPause()
    for _ in range(5):
        pause.is_contended(1.0, 1.1)
    pause.reset()
    assert pause.is_contended(2.0, 2.1)
    assert not pause.is_over(2.1005)
    assert pause.is_over(2.1011)
