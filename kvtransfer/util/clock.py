"""Clocks, which give the current time and make scheduled calls.

ThreadClock has real time; it makes the calls on its own thread, so that a busy event loop does not
delay them. VirtualClock has simulated time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("penstock")

Callback = Callable[[], None]


class Timer:
    """A scheduled call. `cancel` may be called from any thread, at any time."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callback) -> None:
        self.when = when
        self.call: Callback | None = call

    def cancel(self) -> None:
        self.call = None


class Clock(Protocol):
    """The interface of a monotonic clock in seconds, with scheduled calls.

    Calls are made one at a time, in order of their time and then of scheduling.
    """

    def now(self) -> float: ...

    def call_at(self, when: float, call: Callback) -> Timer: ...

    def run_in_thread(self, call: Callback) -> None:
        """Run a function that may block for seconds, without delaying other scheduled calls."""
        ...


class VirtualClock:
    """A clock with simulated time, for one thread. Time passes only in `run`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, call: Callback) -> Timer:
        timer = Timer(max(when, self._now), call)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def run_in_thread(self, call: Callback) -> None:
        self.call_at(self._now, call)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let `seconds` of simulated time pass, or less if `until` becomes true.

        Returns whether `until` became true. Without `until`, returns True.
        """
        end_s = self._now + seconds
        while until is None or not until():
            if not self._timers or self._timers[0][0] > end_s:
                self._now = end_s
                return until is None or until()
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()
        return True


class ThreadClock:
    """A clock with real time. Its thread starts with the first scheduled call, and ends with
    `close`.
    """

    def __init__(self, name: str = "kv-clock") -> None:
        self._name = name
        self._wake = threading.Condition()
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, call: Callback) -> Timer:
        """Schedule a call at the time `when`, in seconds of this clock.

        After `close`, the call is never made.
        """
        timer = Timer(when, call)
        with self._wake:
            heapq.heappush(self._timers, (when, next(self._order), timer))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            if self._timers[0][2] is timer:
                self._wake.notify()
        return timer

    def run_in_thread(self, call: Callback) -> None:
        threading.Thread(target=call, name=f"{self._name}-aside", daemon=True).start()

    def close(self) -> None:
        """Drop all scheduled calls, and wait for the clock's thread to end.

        It does not wait if it is called on that thread.
        """
        with self._wake:
            self._closed = True
            self._timers.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # Make due calls until closed.
        #
        # Log a call that fails, so that later calls are still made.
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                log.exception("kv: a call scheduled by the clock failed")

    def _next(self) -> Callback | None:
        # Wait for the next due call and return it; None when closed.
        with self._wake:
            while not self._closed:
                wait_s = self._timers[0][0] - time.monotonic() if self._timers else None
                if wait_s is not None and wait_s <= 0:
                    call = heapq.heappop(self._timers)[2].call
                    if call is not None:
                        return call
                else:
                    self._wake.wait(wait_s)
            return None
