"""Clocks: what the time is, and calls at a time. ThreadClock is the real one: its thread beats whatever the event loop
is busy with. VirtualClock is for simulation: time passes only when told to.

Not here: what is due when.
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

Call = Callable[[], None]


class Timer:
    """A call to come. `cancel` may be called from any thread, at any time."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Call) -> None:
        self.when = when
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Clock(Protocol):
    """Seconds that never go back, and calls at a time. Calls are made one at a time, in order of time and of asking."""

    def now(self) -> float: ...

    def call_at(self, when: float, call: Call) -> Timer: ...

    def aside(self, call: Call) -> None:
        """Make a call that may block for some seconds, without holding up anything."""
        ...


class VirtualClock:
    """Simulated time, one thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, call: Call) -> Timer:
        timer = Timer(max(when, self._now), call)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def aside(self, call: Call) -> None:
        self.call_at(self._now, call)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let so much time pass, or less if `until` becomes true; whether it did (True without `until`)."""
        end = self._now + seconds
        while until is None or not until():
            if not self._timers or self._timers[0][0] > end:
                self._now = end
                return until is None or until()
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()
        return True


class ThreadClock:
    """Monotonic time; calls are made on one thread of its own, which begins with the first and ends with `close`."""

    def __init__(self, name: str = "kv-clock") -> None:
        self._name = name
        self._wake = threading.Condition()
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, call: Call) -> Timer:
        """A call that is asked for after `close` is never made."""
        timer = Timer(when, call)
        with self._wake:
            heapq.heappush(self._timers, (when, next(self._order), timer))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            if self._timers[0][2] is timer:
                self._wake.notify()
        return timer

    def aside(self, call: Call) -> None:
        threading.Thread(target=call, name=f"{self._name}-aside", daemon=True).start()

    def close(self) -> None:
        """End the thread (unless it is the caller's); calls not yet made are forgotten."""
        with self._wake:
            self._closed = True
            self._timers.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """A call that fails is its maker's bug, and must not stop everybody's heart."""
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                log.exception("a timed call failed")

    def _next(self) -> Call | None:
        """Wait for the next call that is due; None when closed."""
        with self._wake:
            while not self._closed:
                wait = self._timers[0][0] - time.monotonic() if self._timers else None
                if wait is not None and wait <= 0:
                    call = heapq.heappop(self._timers)[2].call
                    if call is not None:
                        return call
                else:
                    self._wake.wait(wait)
            return None
