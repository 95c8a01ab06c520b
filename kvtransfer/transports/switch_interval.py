"""Shortens Python's switch interval (sys.setswitchinterval) while KV is moving.

A thread that returns from a system call needs the interpreter lock. If another thread computes in
Python, it must wait for the switch interval: 5 ms by default, the time of several megabytes of KV.
With the short interval, it gets the lock sooner. Threads that compute alone are not slowed down,
because no other thread requests the lock.
"""

from __future__ import annotations

import os
import sys
import threading


class SwitchInterval:
    """The process-wide interval at which Python switches threads, shortened while KV is moving.

    Several connections may ask for a short interval. When the last one no longer needs it, the
    application's own interval returns, unless the application has set another one meanwhile. There
    is one object per process; any thread may use it.
    """

    __slots__ = ("_application_s", "_count", "_lock", "_set_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._application_s = self._set_s = 0.0

    def shorten(self, seconds: float) -> None:
        """Let Python switch threads at least every `seconds` seconds, until restore() is called.

        Several connections may call this at the same time; the first one sets the interval.
        """
        with self._lock:
            self._count += 1
            self._application_s = 0.0 if self._count == 1 else self._application_s
            if self._count == 1 and sys.getswitchinterval() > seconds:
                self._application_s = sys.getswitchinterval()
                sys.setswitchinterval(seconds)
                self._set_s = sys.getswitchinterval()

    def restore(self) -> None:
        """End one use of the short thread-switch interval.

        The last one restores the application's interval.
        """
        with self._lock:
            self._count -= 1
            if not self._count:
                self._reset()

    def _reset(self) -> None:
        if self._application_s and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._application_s)
        self._application_s = 0.0

    def restore_after_fork(self) -> None:
        """Restore the application's interval in a forked child, which has no KV connections."""
        self._lock = threading.Lock()
        self._count = 0
        self._reset()


SWITCH_INTERVAL = SwitchInterval()
os.register_at_fork(after_in_child=SWITCH_INTERVAL.restore_after_fork)


class SwitchIntervalHold:
    """One connection's request for a short thread-switch interval while it moves KV.

    seconds  the interval while it is requested; 0: the interval is never changed
    is_held  whether the connection requests it now

    Any thread may begin the request; only the connection's thread may end it.
    """

    __slots__ = ("_lock", "is_held", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_held = False
        self._lock = threading.Lock()

    def take(self) -> None:
        """Let Python switch threads more often, unless this connection has already asked for it."""
        if self.is_held or not self.seconds:
            return
        with self._lock:
            if not self.is_held and self.seconds:
                SWITCH_INTERVAL.shorten(self.seconds)
                self.is_held = True

    def drop(self) -> None:
        """End this connection's request for a short thread-switch interval, if there is one."""
        with self._lock:
            if self.is_held:
                self.is_held = False
                SWITCH_INTERVAL.restore()

    def close(self) -> None:
        """End this connection's request for a short interval; later calls of take() do nothing."""
        with self._lock:
            self.seconds = 0.0
        self.drop()
