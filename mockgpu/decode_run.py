"""The duration of many decode-only steps in closed form, so that a simulated clock can skip ahead.

A decoding batch reads one more token of KV per sequence and step, so the step time grows nearly
linearly. A parabola through three step times gives all of them. `Scheduler.decode_only_steps()`
returns for how many steps this holds.
"""

from __future__ import annotations

from bisect import bisect_right

from mockgpu.roofline import StepTimes, StepWork

MOST_STEPS = 4096
_GROWTH = 0.2
"""A run ends when the mean context has grown by this share.

Up to there the parabola is within 0.1 %, and 0.2 % where the measured grid has a kink.
"""


class DecodeRun:
    """A run of `steps` decode-only steps of one batch.

    Times are seconds from the start of the first step.
    """

    __slots__ = ("_base", "_bend", "_slope", "context", "seqs", "steps")

    def __init__(
        self, roofline: StepTimes, seqs: int, context: int, most: int, slowness: float = 1.0
    ) -> None:
        self.seqs, self.context = seqs, context
        self.steps = max(1, min(most, int(context * _GROWTH / seqs)))
        self._base = first = self._at(roofline, 0) * slowness
        self._slope = self._bend = 0.0
        last = self.steps - 1
        if last:
            final = (self._at(roofline, last) * slowness - first) / last
            self._slope = final
            half = last // 2
            if half:
                middle = (self._at(roofline, half) * slowness - first) / half
                self._bend = (final - middle) / (last - half)
                self._slope = middle - self._bend * half

    def _at(self, roofline: StepTimes, step: int) -> float:
        return roofline.step_s(StepWork(0, 0.0, self.seqs, self.context + step * self.seqs))

    def end_of(self, steps: int) -> float:
        """Return the time at which the first `steps` steps have ended, in seconds."""
        pairs = steps * (steps - 1) / 2
        return self._base * steps + self._slope * pairs + self._bend * pairs * (2 * steps - 1) / 3

    def step_s(self, step: int) -> float:
        """Return the duration of one step in seconds; `step` counts from 0."""
        return self._base + self._slope * step + self._bend * step * step

    def completed_by(self, seconds: float) -> int:
        """Return how many steps have ended after `seconds`, but never the last one."""
        return bisect_right(range(1, self.steps), seconds, key=self.end_of)
