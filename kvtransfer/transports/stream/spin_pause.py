"""Decides whether a link's thread may spin before it sleeps, where no native pump does.

_pump.c has the same rule. sched_yield on a core that other threads want costs a turn of theirs,
some milliseconds; a thread that sleeps runs again as soon as its bytes are there.
"""

from __future__ import annotations

_CONTENDED_S = 50e-6  # a longer sched_yield means that other threads want this core
_LEAST_S = 1e-3
_MOST_S = 0.512


class SpinPause:
    """Decides when a thread pauses spinning, because other threads want its core.

    Each pause is twice as long as the one before while the core stays contended. All times are
    seconds on the same clock.
    """

    __slots__ = ("_pause_s", "_until_s")

    def __init__(self) -> None:
        self._pause_s = self._until_s = 0.0

    def is_over(self, now_s: float) -> bool:
        """Return whether the thread may spin."""
        return now_s >= self._until_s

    def is_contended(self, begin_s: float, end_s: float) -> bool:
        """Return whether one poll, from `begin_s` to `end_s`, took so long that spinning pauses."""
        if end_s - begin_s <= _CONTENDED_S:
            return False
        self._pause_s = min(max(_LEAST_S, 2 * self._pause_s), _MOST_S)
        self._until_s = end_s + self._pause_s
        return True

    def reset(self) -> None:
        """Begin with a short pause next time, because a whole spin was not disturbed."""
        self._pause_s = 0.0
