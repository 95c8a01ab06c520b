"""Time of a run of pure decode steps in closed form: what lets a virtual clock skip from one event to the next.

A decoding batch reads one more token of KV per sequence and step, so a step's time grows nearly linearly: a parabola
through three of its steps gives all of them. Which steps may be run so is scheduler.py's (`quiet`).
"""

from __future__ import annotations

from bisect import bisect_right

from mockgpu.roofline import Roofline, Work

MOST_STEPS = 4096
_GROWTH = 0.2
"""A run is cut where the mean context has grown by this share: over such a stretch the parabola is within
0.1 %, and 0.2 where the measured grid has a kink."""


class Run:
    """`steps` decode steps of one batch. Times in seconds from the start of the first one."""

    __slots__ = ("_base", "_bend", "_slope", "context", "seqs", "steps")

    def __init__(
        self, roofline: Roofline, seqs: int, context: int, most: int, slowness: float = 1.0
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

    def _at(self, roofline: Roofline, step: int) -> float:
        return roofline.step_s(Work(0, 0.0, self.seqs, self.context + step * self.seqs))

    def until(self, steps: int) -> float:
        """When the first `steps` of them are over."""
        pairs = steps * (steps - 1) / 2
        return self._base * steps + self._slope * pairs + self._bend * pairs * (2 * steps - 1) / 3

    def step_s(self, step: int) -> float:
        """How long step number `step` takes, from 0."""
        return self._base + self._slope * step + self._bend * step * step

    def over_at(self, seconds: float) -> int:
        """How many of them are over after that time, all but the last at most."""
        return bisect_right(range(1, self.steps), seconds, key=self.until)
