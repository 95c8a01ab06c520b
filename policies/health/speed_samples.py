"""Collects the speed samples of one endpoint, such as times of first tokens, in decaying sums.

Samples are recorded in every pool, whatever its policy. So recording a sample is only an append;
samples are summed up at the next review, once a second. speed_outlier.py compares endpoints with
their peers. The gateway records the samples.
"""

from __future__ import annotations

from bisect import insort
from enum import StrEnum
from math import exp, log
from operator import sub

BINS = 24

RECENT, REFERENCE = 0.76, 0.966
"""Factors by which the weight of a speed sample falls each second.

RECENT     weights halve in 2.5 s; for judging the endpoint itself
REFERENCE  weights halve in 20 s; for judging its peers
"""

NEEDED = (6.0, 3.0, 6.0)
"""Minimum number of samples for a verdict of slowness, by measure (TTFT, TPOT, answer).

The more the ratio exceeds its limit, the fewer are needed, down to a third at twice the limit. This
many of the latest samples keep their full weight, because a quiet endpoint would have no evidence
otherwise. A TPOT sample covers all streams over one second.
"""

MOST_UNCOUNTED = 64
"""Maximum number of samples per measure between two reviews; more would hardly change the mean."""


USUAL_GAIN, LEAST_USUAL = 0.05, 20


class Measure(StrEnum):
    """The measures of an endpoint's speed.

    They are the time to the first token, the time per output token, and the time of a whole answer.
    """

    # Enum's own __hash__ is a Python call.
    __hash__ = str.__hash__

    TTFT = "ttft"
    TPOT = "tpot"
    ANSWER = "answer"


class SpeedSamples:
    """Decaying sums over speed samples, in bins by size of work.

    Each bin has the sum of the samples' seconds, the sum of their work, and their number.

    total  number of samples in all bins; decay does not reduce it below `least`
    bins   the bins that have had samples, in ascending order. All others are 0
    """

    __slots__ = ("bins", "counts", "least", "seconds", "total", "work")

    def __init__(self, least: float) -> None:
        self.least = least
        self.seconds = [0.0] * BINS
        self.work = [0.0] * BINS
        self.counts = [0.0] * BINS
        self.total = 0.0
        self.bins: list[int] = []

    def add(self, work: int, seconds: float) -> None:
        """Add one speed sample: `seconds` for work of size `work`, such as a number of tokens."""
        bin_ = min(BINS - 1, work.bit_length())
        if bin_ not in self.bins:
            insort(self.bins, bin_)
        self.seconds[bin_] += seconds
        self.work[bin_] += work
        self.counts[bin_] += 1.0
        self.total += 1.0

    def mean_s(self, work: int) -> float:
        """Return the mean seconds of the samples in the same bin as `work`; 0: there are none."""
        index = min(BINS - 1, work.bit_length())
        return self.seconds[index] / self.counts[index] if self.counts[index] > 1e-9 else 0.0

    def copy(self) -> SpeedSamples:
        same = SpeedSamples(self.least)
        same.seconds, same.work, same.counts = self.seconds[:], self.work[:], self.counts[:]
        same.total, same.bins = self.total, self.bins[:]
        return same

    def minus(self, other: SpeedSamples) -> SpeedSamples:
        """Return the samples added since `other`, an earlier copy of this object."""
        difference = SpeedSamples(self.least)
        difference.seconds = [*map(sub, self.seconds, other.seconds)]
        difference.work = [*map(sub, self.work, other.work)]
        difference.counts = [*map(sub, self.counts, other.counts)]
        difference.total = self.total - other.total
        difference.bins = sorted({*self.bins, *other.bins})
        return difference

    def decay(self, factor: float) -> None:
        """Reduce the weight of all samples, so that later ones count more.

        factor  the new weight divided by the old one, 0 to 1. It is larger if the total weight
                would fall below `least`, so that an idle endpoint's speed is not forgotten
        """
        if self.total <= self.least:
            return
        factor = max(factor, self.least / self.total)
        for bin_ in self.bins:
            self.seconds[bin_] *= factor
            self.work[bin_] *= factor
            self.counts[bin_] *= factor
        self.total *= factor


class SampleTrack:
    """One endpoint's times in one measure, such as TTFT, from which its speed is judged.

    recent           the samples with fast decay, by which this endpoint is judged
    reference        the same samples with slow decay, by which its peers are judged
    fresh_count      number of samples since the last review
    was_idle         whether the last review found only older samples
    log_usual_ratio  logarithm of the usual ratio of the endpoint's time to its peers' time, over
                     `review_count` reviews
    """

    __slots__ = (
        "_reviewed",
        "_uncounted",
        "fresh_count",
        "log_usual_ratio",
        "recent",
        "reference",
        "review_count",
        "was_idle",
    )

    def __init__(self, needed: float) -> None:
        self.recent, self.reference = SpeedSamples(needed), SpeedSamples(needed)
        self._reviewed = SpeedSamples(needed)
        self._uncounted: list[tuple[int, float]] = []
        self.fresh_count = self.review_count = 0
        self.was_idle = False
        self.log_usual_ratio = 0.0

    def add(self, work: int, seconds: float) -> None:
        """Record that work took `seconds`. The next review of speeds sums up the samples.

        `work` is the size of the work: prompt tokens, streams or output tokens, depending on the
        measure.
        """
        if len(self._uncounted) < MOST_UNCOUNTED:
            self._uncounted.append((work, seconds))

    def aggregate(self) -> None:
        """Add the recorded times to the sums `recent` and `reference`. A review calls this first.

        Recording itself only appends, so that it costs little for each request.
        """
        samples, self._uncounted = self._uncounted, []
        self.fresh_count += len(samples)
        for work, seconds in samples:
            self.recent.add(work, seconds)
            self.reference.add(work, seconds)

    def decay(self) -> None:
        """Reduce the weight of all samples by one second of age, at the end of each review."""
        self.recent.decay(RECENT)
        self.reference.decay(REFERENCE)
        if self.fresh_count:
            self._reviewed = self.recent.copy()
        self.was_idle = not self.fresh_count and self.recent.total > 0.0
        self.fresh_count = 0

    def since_last_review(self, judged: SpeedSamples) -> SpeedSamples:
        """Return the part of the samples `judged` that was recorded after the last review."""
        return judged.minus(self._reviewed)

    def restart(self) -> None:
        """Discard all speed samples, but keep the usual ratio of the endpoint's time to its
        peers'.
        """
        least = self.recent.least
        self.recent, self.reference, self.fresh_count = SpeedSamples(least), SpeedSamples(least), 0
        self._reviewed = SpeedSamples(least)
        self._uncounted = []

    @property
    def usual_ratio(self) -> float:
        """Return the usual ratio of the endpoint's time to its peers' time; 0: not known yet."""
        return exp(self.log_usual_ratio) if self.review_count >= LEAST_USUAL else 0.0

    def update_usual_ratio(self, ratio: float) -> None:
        """Learn the usual ratio of an endpoint's time to its peers': move it towards `ratio`.

        Call it only for a review that found no fault.
        """
        self.review_count += 1
        self.log_usual_ratio += max(USUAL_GAIN, 1.0 / self.review_count) * (
            log(ratio) - self.log_usual_ratio
        )
