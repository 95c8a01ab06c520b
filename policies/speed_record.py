"""The evidence of one endpoint's speed: samples by size of work, and the verdict of the last comparison.

Evidence is gathered on every pool, whatever its policy reads, so a request costs one append; the samples are counted at
the next review. Not here: the comparison with peers (outlier.py), and who takes the samples (gateway/booking.py,
gateway/speed_monitor.py).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from math import ceil, exp, log
from operator import sub

import msgspec

BINS = 24
SAME_STEP_S, SAME_STEP_SHARE = 0.002, 0.05
"""First tokens that follow each other within this time, or this share of the step, were made by one step."""

RECENT, REFERENCE = 0.76, 0.966
"""What one second leaves of the evidence: half is gone after 2.5 s and after 20 s."""

NEEDED = (6.0, 3.0, 6.0)
"""Samples that a verdict needs, by measure; a third of them does at twice the ratio. So many stay however old they are:
a quiet endpoint would have no evidence otherwise. One of TPOT is of all streams over a second."""

MOST_UNCOUNTED = 64
"""Samples of a measure that are kept between two reviews. Those that come after them are not needed for a mean."""

LEAST_SHARE_CLEAR = 0.2
"""Share of a second without a prompt in work that must be left before a stream's pace is measured in it."""

JOIN_S = 0.03
"""A prompt sent so soon after a prefill step began may be part of it: engines first end the decode step under way."""

LEAST_OVERTAKEN_S = 0.1
"""Shorter delays of a step that was given up are no evidence."""

LEAST_PACED = 3.0
"""Prompts that an endpoint has to complete before it counts as one that keeps pace."""

USUAL_GAIN, LEAST_USUAL = 0.05, 20
FIRST_PROBE_GAP_S, MOST_PROBE_GAP_S = 0.5, 30.0


class Measure(StrEnum):
    """What an endpoint is slow at."""

    TTFT = "ttft"
    TPOT = "tpot"
    ANSWER = "answer"


class Verdict(StrEnum):
    """SUSPECT: the endpoint gets few requests while others have room. SLOW: it is to be ejected."""

    NORMAL = "normal"
    SUSPECT = "suspect"
    SLOW = "slow"


class Slowness(msgspec.Struct, frozen=True):
    """How slow an endpoint was found: `seconds` per sample where its peers take `peers_s` for the same work."""

    measure: Measure
    ratio: float
    seconds: float
    peers_s: float


class Samples:
    """Seconds and counts by bin of work. `total` is the sum of counts; `least` of them are never forgotten."""

    __slots__ = ("counts", "least", "seconds", "total")

    def __init__(self, least: float) -> None:
        self.least = least
        self.seconds = [0.0] * BINS
        self.counts = [0.0] * BINS
        self.total = 0.0

    def add(self, place: int, seconds: float) -> None:
        self.seconds[place] += seconds
        self.counts[place] += 1.0
        self.total += 1.0

    def mean_s(self, work: int) -> float:
        """The mean of the samples of such work; 0 if there are none."""
        place = min(BINS - 1, work.bit_length())
        return self.seconds[place] / self.counts[place] if self.counts[place] > 1e-9 else 0.0

    def copy(self) -> Samples:
        return self.less(Samples(self.least))

    def less(self, other: Samples) -> Samples:
        """What there is beyond the other's."""
        beyond = Samples(self.least)
        beyond.seconds = [*map(sub, self.seconds, other.seconds)]
        beyond.counts = [*map(sub, self.counts, other.counts)]
        beyond.total = self.total - other.total
        return beyond

    def decay(self, kept: float) -> None:
        """Forget a share, but never all of the last few samples."""
        if self.total <= self.least:
            return
        kept = max(kept, self.least / self.total)
        self.seconds = [each * kept for each in self.seconds]
        self.counts = [each * kept for each in self.counts]
        self.total *= kept


class Track:
    """One measure of one endpoint.

    recent, reference  the same samples, forgotten soon and late: what is judged, and what peers are judged by
    fresh              how many of them came before the review under way and after the last one
    usual              the logarithm of its usual ratio, over `seen` reviews
    """

    __slots__ = ("_reviewed", "_uncounted", "fresh", "recent", "reference", "seen", "usual")

    def __init__(self, needed: float) -> None:
        self.recent, self.reference = Samples(needed), Samples(needed)
        self._reviewed = Samples(needed)
        self._uncounted: list[tuple[int, float]] = []
        self.fresh = self.seen = 0
        self.usual = 0.0

    def add(self, work: int, seconds: float) -> None:
        """A sample of so much work: prompt tokens, streams or output tokens. It is counted at the next review."""
        if len(self._uncounted) < MOST_UNCOUNTED:
            self._uncounted.append((work, seconds))

    def count(self) -> None:
        """Count the samples that have come since the last review."""
        samples, self._uncounted = self._uncounted, []
        self.fresh += len(samples)
        for work, seconds in samples:
            place = min(BINS - 1, work.bit_length())
            self.recent.add(place, seconds)
            self.reference.add(place, seconds)

    def age(self) -> None:
        """A second has passed."""
        self.recent.decay(RECENT)
        self.reference.decay(REFERENCE)
        if self.fresh:
            self._reviewed = self.recent.copy()
        self.fresh = 0

    def latest(self, judged: Samples) -> Samples:
        """Of these samples, those since the last review."""
        return judged.less(self._reviewed)

    def restart(self) -> None:
        """Forget the evidence; what is usual stays."""
        least = self.recent.least
        self.recent, self.reference, self.fresh = Samples(least), Samples(least), 0
        self._reviewed = Samples(least)
        self._uncounted = []

    @property
    def usual_ratio(self) -> float:
        """Its usual ratio to its peers; 0 until it is known."""
        return exp(self.usual) if self.seen >= LEAST_USUAL else 0.0

    def learn(self, ratio: float) -> None:
        """A ratio that is no fault is what is usual."""
        self.seen += 1
        self.usual += max(USUAL_GAIN, 1.0 / self.seen) * (log(ratio) - self.usual)


class SpeedRecord:
    """The evidence of one endpoint's speed, and the verdict of the last review.

    since      when the prefill step under way began: at the first token before, or when the first of them was sent
    has_kept_pace  since the last restart(), a review has found completed prompts there as fast as its peers'
    prefill_s  seconds ever in which a prompt was waiting, up to `since`
    output     tokens of answers that came whole, lately
    slowness   why it is suspect or slow; kept while it is ejected
    """

    __slots__ = (
        *("_begun", "_clear_from", "_probe_at", "_probe_gap_s", "_queue", "_step_s", "_step_tokens", "_streak"),
        *("has_kept_pace", "output", "prefill_s", "since", "slowness", "tracks", "verdict"),
    )

    def __init__(self) -> None:
        self.tracks = tuple(Track(needed) for needed in NEEDED)
        self._queue: deque[int] = deque()
        self._begun = 0  # prompts in the queue that the step under way may compute
        self.since = self.prefill_s = 0.0
        self._step_s, self._step_tokens = 0.0, 0
        self._clear_from = self.output = self._probe_at = 0.0
        self._probe_gap_s = FIRST_PROBE_GAP_S
        self._streak = 0
        self.has_kept_pace = False
        self.verdict = Verdict.NORMAL
        self.slowness: Slowness | None = None

    @property
    def waiting(self) -> int:
        """Prompts sent there whose first token will be seen and has not been."""
        return len(self._queue)

    def sent(self, tokens: int, now: float) -> None:
        """A prompt was sent whose first token will be seen; `tokens` of it are not cached."""
        if not self._queue:
            self.since = now
            self._begun = 1
        elif now - self.since < JOIN_S:
            self._begun += 1
        self._queue.append(tokens)

    def dropped(self, tokens: int) -> None:
        """It was taken back before its first token."""
        with suppress(ValueError):
            self._queue.remove(tokens)

    def overtaken(self, tokens: int, work: int, now: float, *, is_doubted: bool) -> None:
        """Take a prompt back because another endpoint answered first, or because it was late.

        The prompt whose turn it was is evidence of how long its step takes at least. At an endpoint in doubt the step
        is expected to last as long again. `work` is what the step had to compute at most.
        """
        if not self._queue or self._queue[0] != tokens:
            self.dropped(tokens)
            return
        seconds = now - self.since
        if self._step_tokens:
            self.tracks[0].add(self._step_tokens, self._step_s)
        self._step_s, self._step_tokens = 0.0, 0
        self._queue.popleft()
        self.since, self._begun = now, len(self._queue)
        self.prefill_s += seconds
        if seconds >= LEAST_OVERTAKEN_S:
            self.tracks[0].add(work, 2.0 * seconds if is_doubted else seconds)

    def first_token(self, tokens: int, now: float) -> None:
        """A first token came; `tokens` of its prompt were not cached."""
        seconds = now - self.since
        self.since = now
        queue = self._queue
        if queue and queue[0] == tokens:
            queue.popleft()
        else:
            self.dropped(tokens)
        self._begun = len(queue)
        self.prefill_s += seconds
        if seconds <= SAME_STEP_S + SAME_STEP_SHARE * self._step_s:
            self._step_s += seconds
            self._step_tokens += tokens
            return
        if self._step_tokens:
            self.tracks[0].add(self._step_tokens, self._step_s)
        self._step_s, self._step_tokens = seconds, tokens

    def streamed(self, streams: int, tokens: int, seconds: float, now: float) -> None:
        """So many streams made so many tokens together in the `seconds` up to now."""
        clear_from = self.prefill_s + (now - self.since if self.waiting else 0.0)
        clear_s = seconds - (clear_from - self._clear_from)
        self._clear_from = clear_from
        if streams and clear_s > LEAST_SHARE_CLEAR * seconds:
            self.tracks[1].add(streams, clear_s * streams / max(tokens, streams * 0.5))

    def answered(self, tokens: int, seconds: float) -> None:
        """An answer of so many tokens came whole."""
        self.output += tokens
        self.tracks[2].add(tokens, seconds)

    def take_probe(self, now: float) -> bool:
        """Whether an ejected endpoint may be given work to time now: twice as late each time."""
        if now < self._probe_at:
            return False
        self._probe_gap_s = min(MOST_PROBE_GAP_S, 2.0 * self._probe_gap_s)
        self._probe_at = now + self._probe_gap_s
        return True

    def accept(self) -> None:
        """The endpoint is in rotation again: nothing is held against it."""
        self.restart()
        self.slowness, self._probe_gap_s = None, FIRST_PROBE_GAP_S

    def restart(self) -> None:
        """Forget what was measured: the endpoint was ejected, or comes back."""
        for track in self.tracks:
            track.restart()
        self._step_s, self._step_tokens = 0.0, 0
        self._streak = 0
        self.has_kept_pace = False
        self.verdict = Verdict.NORMAL

    def prepare(self, now: float) -> None:
        """Before a review: count the samples; the last step is over."""
        if not self.waiting or now - self.since > SAME_STEP_S:
            if self._step_tokens:
                self.tracks[0].add(self._step_tokens, self._step_s)
            self._step_s, self._step_tokens = 0.0, 0
        for track in self.tracks:
            track.count()

    def step_tokens(self, waiting_tokens: int, budget_tokens: int, others: int) -> int:
        """The most prompt tokens that the step under way may have to compute before its first token.

        Of `waiting_tokens` booked, engines take `budget_tokens` at a time, in the order in which they came. `others`
        are prompts among them whose first token will not be seen: any number of these may come first.
        """
        if others or not self._queue:
            return waiting_tokens
        return min(waiting_tokens, ceil(self._queue[0] / budget_tokens) * budget_tokens)

    def begun_tokens(self, step_tokens: int) -> int:
        """Of `step_tokens`, those of prompts that were there when the step under way began: its likely size."""
        queue = self._queue
        return step_tokens if self._begun >= len(queue) else min(step_tokens, sum(islice(queue, self._begun)))

    def judge(self, found: Slowness | None, change: int, clear: bool, reviews: int) -> Verdict:
        """The verdict after a review. `change`: 1 when the latest samples were slow too, -1 when they were not, 0
        without any; `clear`: no measure is near the limit."""
        if found is not None:
            self.slowness = found
            self._streak = max(0, self._streak + change)
        elif clear:
            self._streak, self.slowness = 0, None
        slow = self._streak >= reviews
        self.verdict = Verdict.SLOW if slow else Verdict.SUSPECT if self._streak else Verdict.NORMAL
        prompts = self.tracks[0]
        if (clear and found is None and prompts.reference.total >= LEAST_PACED) or prompts.usual_ratio:
            self.has_kept_pace = True
        return self.verdict
