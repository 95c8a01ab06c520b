"""The speed samples and the verdict of one endpoint, and which prompts its engine computes now.

A review (speed_outlier.py) compares the records of a pool's endpoints, and sets their verdicts.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from math import ceil, inf

import msgspec

from policies.engine.step_time import NEUTRAL
from policies.health.speed_samples import NEEDED, Measure, SampleTrack

SAME_STEP_S, SAME_STEP_SHARE = 0.002, 0.05
"""First tokens that come close together are taken for results of the same engine step.

They are close if they differ by at most SAME_STEP_S seconds plus SAME_STEP_SHARE of the step's
duration.
"""
LEAST_SHARE_CLEAR = 0.2
"""Share of a second that must be free of prefill for the second to give a TPOT sample.

Prefill delays the running streams. If little time is free of it, the rest would say little about
their own speed.
"""
JOIN_S, IDLE_JOIN_S = 0.03, 0.005
"""Seconds after the begin of a prefill step in which a new prompt may still become part of it.

JOIN_S       for an engine with streams, which first finishes the running decode step
IDLE_JOIN_S  for an engine without streams, which begins the step immediately
"""
LEAST_PACED = 3.0
"""Minimum number of prompts that an endpoint must have completed to be found as fast as its
peers.
"""
MOST_AHEAD = 1.5
"""Largest amount of unknown work in a prefill step that still gives a sample.

A step may compute tokens of prompts that are not complete yet. It gives no sample if all its tokens
may be more than this multiple of the tokens of its completed prompts. The step after it gives no
sample either.
"""
FIRST_PROBE_GAP_S, MOST_PROBE_GAP_S = 0.5, 30.0


class SpeedVerdict(StrEnum):
    """The verdicts on an endpoint's speed.

    SUSPECT  the endpoint gets few requests while other endpoints have capacity
    SLOW     the endpoint should be ejected
    """

    NORMAL = "normal"
    SUSPECT = "suspect"
    SLOW = "slow"


class Slowness(msgspec.Struct, frozen=True):
    """How slow an endpoint is in one measure, such as TTFT.

    ratio    the endpoint's time divided by its peers' time for the same work
    seconds  the endpoint's mean seconds per sample
    peers_s  mean seconds that its peers would take for the same work
    """

    measure: Measure
    ratio: float
    seconds: float
    peers_s: float


class SpeedRecord:
    """The speed samples of one endpoint, and the verdict of the last review.

    A prefill step is one pass of the engine over waiting prompts. Their first tokens mark its end.

    since          beginning of the current prefill step (monotonic seconds). It is the previous
                   first token, the sending of the first waiting prompt, or the expected end of an
                   abandoned step, which may be in the future
    is_timed       whether `since` is exact and the step has given no sample yet
    has_kept_pace  whether a review since the last restart() has found the endpoint as fast as its
                   peers
    prefill_s      total seconds, up to `since`, in which a prompt was waiting
    output         tokens of recent answers that were not streamed
    slow_measure   the measure in which the last slow samples were slow; None: they are normal again
    slowness       why the endpoint is suspect or slow, also while it is ejected for that; None: it
                   is neither
    """

    __slots__ = (
        *(
            "_step_prompts",
            "_clear_from",
            "_dropped_tokens",
            "_has_joined",
            "_is_begin_known",
            "_is_counted",
            "_is_partial",
            "_most_tokens",
            "_join_s",
            "_running_since",
            "_paused_until",
            "_probe_at",
            "_probe_gap_s",
            "_queue",
            "_step_s",
            "_step_tokens",
            "_streak",
        ),
        *(
            "has_kept_pace",
            "is_timed",
            "output",
            "prefill_s",
            "since",
            "slow_measure",
            "slowness",
            "tracks",
            "verdict",
        ),
    )

    def __init__(self) -> None:
        self.tracks = tuple(SampleTrack(needed) for needed in NEEDED)
        self._queue: deque[int] = deque()
        self._step_prompts = 0  # prompts in the queue that the step under way may compute
        self._join_s = IDLE_JOIN_S
        self.since = self._running_since = self._paused_until = -inf
        self.prefill_s = 0.0
        self._step_s, self._step_tokens = 0.0, 0
        self._is_begin_known = self.is_timed = True
        self._most_tokens = 0  # maximum tokens that the current step may have computed
        self._has_joined, self._is_counted, self._is_partial = False, True, False
        self._dropped_tokens = 0  # tokens of cancelled prompts that the current step still computes
        self._clear_from = self.output = self._probe_at = 0.0
        self._probe_gap_s = FIRST_PROBE_GAP_S
        self._streak = 0.0
        self.has_kept_pace = False
        self.verdict = SpeedVerdict.NORMAL
        self.slow_measure: Measure | None = None
        self.slowness: Slowness | None = None

    @property
    def waiting(self) -> int:
        """Return the number of prompts at the endpoint that wait for their first token.

        Prompts whose first token cannot be observed are left out.
        """
        return len(self._queue)

    def on_sent(self, tokens: int, now: float, *, is_decoding: bool = True) -> None:
        """Record that a prompt whose first token can be observed was sent to the endpoint.

        tokens       uncached tokens of the prompt
        is_decoding  whether the engine generates answers, so that it may first finish a decode step
        """
        if not self._queue:
            if now >= self.since:  # before that, an abandoned step probably still runs
                self._begin_next_step(now)
                self._running_since = now
            self._step_prompts = 1
            self._join_s = JOIN_S if is_decoding else IDLE_JOIN_S
        elif now - self.since < self._join_s:
            self._step_prompts += 1
            self._has_joined = True
        self._queue.append(tokens)

    def is_behind(self, sent_at: float) -> bool:
        """Return whether a prompt sent at `sent_at` certainly waits for the next engine step.

        Prompts sent shortly after the current step began may be part of it. The engine completes a
        step even if its requests have been cancelled.
        """
        return sent_at - self._running_since >= JOIN_S

    def on_dropped(self, tokens: int, now: float, *, step_s: float = 0.0) -> None:
        """Record that a prompt of `tokens` uncached tokens was cancelled before its first token.

        The engine still finishes the step that computes the prompt, and is busy until then.
        `step_s` is the total duration of that step in seconds; 0: unknown.
        """
        index = self._index_of(tokens)
        if index is None:
            return
        del self._queue[index]
        if index >= self._step_prompts:
            return
        self._step_prompts -= 1
        if now < self.since:
            return  # the prompt waited for the end of another abandoned step
        if self._step_prompts:
            self._dropped_tokens += tokens
        else:
            self._abandon_step(now, step_s)

    def _index_of(self, tokens: int) -> int | None:
        # Return the index of the first waiting prompt with this many tokens.
        with suppress(ValueError):
            return self._queue.index(tokens)
        return None

    def _abandon_step(self, now: float, step_s: float) -> None:
        # Count the step under way as prefill until it would have ended, and begin the next one.
        #
        # The end of a step is estimated only if its begin is known. Otherwise a slow engine whose
        # prompts all move away would give no evidence. Its streams may pause until then anyway.
        ends_at = max(now, self.since + step_s) if self._is_begin_known else now
        if not self._is_begin_known:
            self._paused_until = now + step_s
        self.prefill_s += ends_at - self.since
        self._begin_next_step(ends_at)
        self._is_begin_known = self.is_timed = False

    def on_overtaken(
        self, tokens: int, work: int, now: float, *, late_s: float, step_s: float = 0.0
    ) -> None:
        """Record that a waiting request was answered by, or moved to, another endpoint.

        Its first token had not come from this endpoint, which is evidence that the endpoint is
        slow.

        tokens  uncached tokens of the prompt
        work    tokens of the step in which the prompt would have been computed
        now     monotonic seconds
        late_s  minimum seconds that this step will take, if it is late; 0: it is not late. If the
                prompt was the next to be computed, this is added as a sample, at most one per step
        step_s  total seconds of the step that computes the prompt; 0: unknown
        """
        if late_s and self.is_timed and self._queue and self._queue[0] == tokens:
            self._end_step()
            self.tracks[0].add(work, late_s)
            self.is_timed = False
        self.on_dropped(tokens, now, step_s=max(step_s, late_s))

    def on_first_token(
        self, tokens: int, now: float, *, budget_tokens: int = NEUTRAL.budget_tokens
    ) -> None:
        """Record the first token of a prompt, of which `tokens` tokens were not cached.

        `budget_tokens` is the maximum number of prompt tokens that the engine computes in one step.
        """
        seconds, is_timed = now - self.since, self.is_timed
        most_tokens = 0
        if self._has_joined:
            most_tokens = self.current_step_tokens(
                self.step_tokens(sum(self._queue), budget_tokens, 0)
            )
        index = self._index_of(tokens)
        if index is not None:
            del self._queue[index]
        dropped_tokens = self._dropped_tokens
        self._begin_next_step(now)
        self._running_since = now
        self.prefill_s += seconds
        if is_timed and seconds <= SAME_STEP_S + SAME_STEP_SHARE * self._step_s:
            self._step_s += seconds
            self._step_tokens += tokens
            return
        self._end_step()
        self._step_s, self._step_tokens = seconds, tokens + dropped_tokens
        self._most_tokens = most_tokens
        is_known = is_timed and dropped_tokens <= (MOST_AHEAD - 1.0) * tokens
        self._is_counted = is_known and not self._is_partial
        self._is_partial = False

    def _end_step(self) -> None:
        # Make a sample of the last prefill step whose first tokens have come.
        tokens = self._step_tokens
        if tokens:
            self._is_partial = self._most_tokens > MOST_AHEAD * tokens
            if self._is_counted and not self._is_partial:
                self.tracks[0].add(tokens, self._step_s)
        self._step_s, self._step_tokens = 0.0, 0

    def _begin_next_step(self, now: float) -> None:
        # Let a prefill step of all waiting prompts begin now.
        self.since, self._step_prompts, self._join_s = now, len(self._queue), IDLE_JOIN_S
        self._dropped_tokens, self._has_joined = 0, False
        self._is_begin_known = self.is_timed = True

    def record_streams(self, streams: int, tokens: int, seconds: float, now: float) -> None:
        running_s = now - self.since  # negative: an abandoned step probably goes on
        clear_from = self.prefill_s + (running_s if self.waiting else min(0.0, running_s))
        clear_s = seconds - (clear_from - self._clear_from)
        self._clear_from = clear_from
        if now - seconds < self._paused_until:
            return
        if streams and clear_s > LEAST_SHARE_CLEAR * seconds:
            self.tracks[1].add(streams, clear_s * streams / max(tokens, streams * 0.5))

    def record_answer(self, tokens: int, seconds: float) -> None:
        self.output += tokens
        self.tracks[2].add(tokens, seconds)

    def try_start_probe(self, now: float) -> bool:
        """Return whether an ejected endpoint may be sent a probe (a test request) now.

        If so, the interval until the next probe doubles.
        """
        if now < self._probe_at:
            return False
        self._probe_gap_s = min(MOST_PROBE_GAP_S, 2.0 * self._probe_gap_s)
        self._probe_at = now + self._probe_gap_s
        return True

    def accept(self) -> None:
        """Forget all samples and the verdict "slow", so that the endpoint gets requests again."""
        self.restart()
        self.slowness, self._probe_gap_s = None, FIRST_PROBE_GAP_S

    def restart(self) -> None:
        """Discard the samples and the verdict, because the endpoint was ejected or has returned."""
        for track in self.tracks:
            track.restart()
        self._step_s, self._step_tokens = 0.0, 0
        self._streak, self.slow_measure = 0.0, None
        self.has_kept_pace = False
        self.verdict = SpeedVerdict.NORMAL

    def prepare(self, now: float) -> None:
        """Sum up the samples since the last review, so that the next one can compare the endpoints.

        The last prefill step counts as ended if no prompt waits, or if no first token has arrived
        for longer than SAME_STEP_S.
        """
        if not self.waiting or now - self.since > SAME_STEP_S:
            self._end_step()
        for track in self.tracks:
            track.aggregate()

    def step_tokens(self, waiting_tokens: int, budget_tokens: int, others: int) -> int:
        """Return the maximum number of prompt tokens in the current step before its first token.

        Engines compute `budget_tokens` of the `waiting_tokens` at a time, in order of arrival.
        `others` is the number of waiting prompts whose first token cannot be observed; they may be
        computed first.
        """
        if others or not self._queue:
            return waiting_tokens
        tokens = self._queue[0] + self._dropped_tokens
        most = ceil(tokens / budget_tokens) * budget_tokens
        return min(waiting_tokens + self._dropped_tokens, most)

    def current_step_tokens(self, step_tokens: int) -> int:
        """Return the likely size of the current prefill step, in tokens, at most `step_tokens`.

        It is the sum of the prompts that were waiting when the step began.
        """
        queue = self._queue
        return (
            step_tokens
            if self._step_prompts >= len(queue)
            else min(step_tokens, sum(islice(queue, self._step_prompts)) + self._dropped_tokens)
        )

    def set_verdict(
        self,
        found: Slowness | None,
        change: float,
        clear: bool,
        reviews: int,
        *,
        has_enough: bool = True,
    ) -> SpeedVerdict:
        """Set the verdict on the endpoint's speed after a review, and return it.

        found       the slowness that the review found; None: there is none
        change      1 if the latest samples were slow too (less if they are weak evidence), -1 if
                    they were not, 0 if there are none
        clear       whether no measure is near its limit
        reviews     number of consecutive slow reviews after which the endpoint counts as slow
        has_enough  whether there were enough samples for a verdict. A slow review with fewer
                    counts, but the verdict waits for a review with enough
        """
        if found is None and clear:
            self._streak, self.slowness, self.slow_measure = 0.0, None, None
        else:
            self._streak = max(0.0, self._streak + change)
        if found is not None:
            self.slow_measure = found.measure
            if has_enough:
                self.slowness = found
        is_suspect = self._streak > 0 and self.slowness is not None
        slow = is_suspect and self._streak >= reviews
        self.verdict = (
            SpeedVerdict.SLOW
            if slow
            else SpeedVerdict.SUSPECT
            if is_suspect
            else SpeedVerdict.NORMAL
        )
        prompts = self.tracks[0]
        if (
            clear and found is None and prompts.reference.total >= LEAST_PACED
        ) or prompts.usual_ratio:
            self.has_kept_pace = True
        return self.verdict
