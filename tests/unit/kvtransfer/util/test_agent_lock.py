"""Tests of work that runs when a KV agent's lock is released, in the thread that releases it."""

from __future__ import annotations

import threading

import pytest

from kvtransfer.util.agent_lock import AgentLock


def free(hold: AgentLock) -> bool:
    # Return whether another thread can acquire the lock.
    acquired = threading.Event()

    def take() -> None:
        with hold:
            acquired.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return acquired.wait(5)


def test_what_is_put_aside_is_done_by_its_holder_after_the_last_letting_go() -> None:
    hold, done = AgentLock(), list[tuple[int, bool, threading.Thread]]()

    def work(number: int) -> None:
        done.append((number, free(hold), threading.current_thread()))
        if number == 1:
            with hold:
                hold.defer(lambda: work(3))

    with hold:
        with hold:
            hold.defer(lambda: work(1))
            hold.defer(lambda: work(2))
        assert not done
    assert done == [(number, True, threading.current_thread()) for number in (1, 3, 2)]


def test_the_lock_is_released_after_an_exception() -> None:
    hold, done = AgentLock(), list[int]()

    def fail() -> None:
        with hold:
            hold.defer(lambda: done.append(1))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert done == [1]
    assert free(hold)
