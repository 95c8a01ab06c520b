"""Computes the duration of many decode-only engine steps in closed form, so that a simulated clock
can skip ahead.

A decoding batch reads one more token of KV per sequence and step, so the step time grows nearly
linearly. A parabola through three step times gives all of them. `Scheduler.decode_only_steps()`
returns for how many steps this holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

MOST_STEPS = 4096
_GROWTH = 0.2
"""How much a batch's mean context may grow, as a share, before a run of steps ends.

Within that growth, the parabola is exact to 0.1 %, and to 0.2 % where the measured grid has a kink.
"""


def most_steps(seqs: int, context: int, most: int) -> int:
    """Return the largest number of decode-only steps, from 1 to `most`, that one run may have.

    seqs     number of sequences in the batch
    context  sum of their contexts, in tokens
    most     upper limit of the result
    """
    return max(1, min(most, int(context * _GROWTH / seqs)))


class DecodeRun:
    """A run of `steps` consecutive engine steps that only decode.

    It belongs to one batch, or to ranks whose steps begin and end together. Times are in seconds
    from the start of the first step. The argument `step_s` returns the duration of a step by its
    number, which counts from 0.
    """

    __slots__ = ("_base", "_bend", "_slope", "steps")

    def __init__(self, step_s: Callable[[int], float], steps: int) -> None:
        self.steps = steps
        self._base = first = step_s(0)
        self._slope = self._bend = 0.0
        last = steps - 1
        if last:
            final = (step_s(last) - first) / last
            self._slope = final
            half = last // 2
            if half:
                middle = (step_s(half) - first) / half
                self._bend = (final - middle) / (last - half)
                self._slope = middle - self._bend * half

    def end_of(self, steps: int) -> float:
        """Return the time at which the first `steps` engine steps of the run have ended, in
        seconds.
        """
        pairs = steps * (steps - 1) / 2
        return self._base * steps + self._slope * pairs + self._bend * pairs * (2 * steps - 1) / 3

    def step_s(self, step: int) -> float:
        """Return the duration of one step of the run in seconds; `step` counts from 0."""
        return self._base + self._slope * step + self._bend * step * step

    def completed_by(self, seconds: float) -> int:
        """Return how many steps of the run have ended after `seconds` seconds, but never the last
        one.
        """
        return bisect_right(range(1, self.steps), seconds, key=self.end_of)
