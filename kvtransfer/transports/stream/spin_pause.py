"""Decides whether a link's thread may spin (poll without pause) before it sleeps.

_pump.c has the same rule for links that use the native pump. On a core that other threads want,
each poll waits until another thread has had its turn, for some milliseconds. A thread that sleeps
runs again as soon as its bytes have arrived.
"""

from __future__ import annotations

_CONTENDED_S = 50e-6  # a longer sched_yield means that other threads want this core
_LEAST_S = 1e-3
_MOST_S = 0.512


class SpinPause:
    """Decides when a thread stops spinning for a while, because other threads want its core.

    While they want it, each pause is twice as long as the one before. All times are in seconds on
    the same clock.
    """

    __slots__ = ("_pause_s", "_until_s")

    def __init__(self) -> None:
        self._pause_s = self._until_s = 0.0

    def is_over(self, now_s: float) -> bool:
        """Return whether the pause has ended, so that the link's thread may spin again."""
        return now_s >= self._until_s

    def is_contended(self, begin_s: float, end_s: float) -> bool:
        """Return whether a poll from `begin_s` to `end_s` took so long that spinning must pause."""
        if end_s - begin_s <= _CONTENDED_S:
            return False
        self._pause_s = min(max(_LEAST_S, 2 * self._pause_s), _MOST_S)
        self._until_s = end_s + self._pause_s
        return True

    def reset(self) -> None:
        """Make the next pause short again, because other threads did not want the core."""
        self._pause_s = 0.0
