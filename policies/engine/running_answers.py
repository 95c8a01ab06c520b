"""Estimates the final lengths of the answers that an engine generates at present.

A prefill delays all running answers. Whether that makes an answer late depends on its final length,
over which the delay is spread, and on the delays that it has had. The length is not known before
the end, but an answer is longer than what has been generated of it, and earlier answers show how
lengths are distributed.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from policies.engine.output_length import CLASSES, RecentLengths

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.queued_prompt import QueuedPrompt

LEAST_TOKENS = 8.0
"""Minimum assumed length of an answer in tokens. A prefill makes shorter ones late in any case."""

MOST_ENDED = 64
"""Number of ended answers, beside as many as are running, that the heap of ages may hold."""

LengthGroup = tuple[float, float, float]
"""Running answers of about one final length: their expected number, 1 over that length in tokens,
and the mean of `prefill_s` (EngineModel) at their first tokens."""


class RunningAnswers:
    """The running answers of one engine by age, from which `groups` estimates their lengths.

    Lengths are divided by the expected length of the request, and fall into CLASSES classes of
    equal probability. An answer has the age k if it is longer than the median lengths of k classes.
    So its own length is in one of the other classes, each with the same probability.
    """

    __slots__ = (
        "_began",
        "_counts",
        "_groups",
        "_inverses",
        "_lengths",
        "_load",
        "_next",
        "_number",
    )

    def __init__(self, lengths: RecentLengths) -> None:
        self._lengths = lengths
        self._counts = [0] * (CLASSES + 1)  # by age
        self._inverses = [0.0] * (CLASSES + 1)  # sums of 1 / expected length
        self._began = [0.0] * (CLASSES + 1)  # sums of the prefill seconds at first tokens
        # (step at which the answer reaches its next age, entry number, answer), as a heap
        self._next: list[tuple[float, int, QueuedPrompt]] = []
        self._number = 0
        self._groups: list[LengthGroup] | None = None
        self._load = (0, 0)

    def add(self, prompt: QueuedPrompt) -> None:
        """Add an answer whose first token has arrived."""
        if prompt.output_tokens > 1.0:
            self._enter(prompt, prompt.decode_begin_step)
            self._lengths.begin(prompt)
            self._groups = None

    def remove(self, prompt: QueuedPrompt) -> None:
        """Remove an answer that has ended, if it was added."""
        if prompt.length_class >= 0:
            self._leave(prompt)
            prompt.length_class = -1
            self._groups = None
            if len(self._next) > MOST_ENDED + 2 * sum(self._counts):
                self._drop_ended()

    def groups(self, load: EngineLoad, steps: float, prefill_s: float) -> list[LengthGroup]:
        """Return the endpoint's answers grouped by age and by their probable final length.

        Answers without a first token count as well. Other gateways' answers are assumed to be
        distributed like the own ones.

        steps      number of decode steps of the engine so far
        prefill_s  total seconds of its steps with prompts
        """
        if self._next and self._next[0][0] <= steps:
            self._advance(steps)
        if self._groups is None or self._load != (load.answers, load.expected_tokens):
            self._groups = self._group(load, prefill_s)
            self._load = load.answers, load.expected_tokens
        return self._groups

    def _group(self, load: EngineLoad, prefill_s: float) -> list[LengthGroup]:
        answers, running = load.answers, sum(self._counts)
        if not answers:
            return []
        own = answers - load.peer_load.answers
        scale = answers / own if own > 0 and running else 1.0
        ratios, groups = self._lengths.quantiles(), []
        waiting = answers / scale - running
        if waiting > 0.0:
            inverse = answers / max(1, load.expected_tokens)
            share = scale * waiting / CLASSES
            groups += [(share, per_token(inverse / ratio), prefill_s) for ratio in ratios]
        for age, count in enumerate(self._counts):
            if not count:
                continue
            inverse, began_s = self._inverses[age] / count, self._began[age] / count
            if age == CLASSES:
                groups.append((scale * count, per_token(inverse), began_s))
                continue
            share = scale * count / (CLASSES - age)
            groups += [(share, per_token(inverse / ratio), began_s) for ratio in ratios[age:]]
        return groups

    def _advance(self, steps: float) -> None:
        # Move the answers that have reached their next age.
        following = self._next
        while following and following[0][0] <= steps:
            _, _, prompt = heappop(following)
            if prompt.length_class >= 0:
                self._leave(prompt)
                self._enter(prompt, steps)
                self._groups = None

    def _drop_ended(self) -> None:
        # Remove ended answers from the heap.
        #
        # `groups` removes them too, but policies that do not price never call it.
        self._next = [entry for entry in self._next if entry[2].length_class >= 0]
        heapify(self._next)

    def _enter(self, prompt: QueuedPrompt, steps: float) -> None:
        generated, expected = steps - prompt.decode_begin_step, prompt.output_tokens
        ratios = self._lengths.quantiles()
        prompt.length_class = age = bisect_right(ratios, generated / expected)
        if age == CLASSES:  # longer than nearly all earlier answers: expected to double in length
            expected = next_tokens = 2.0 * generated
        else:
            next_tokens = ratios[age] * expected
        prompt.per_expected_token = 1.0 / expected
        self._counts[age] += 1
        self._inverses[age] += prompt.per_expected_token
        self._began[age] += prompt.prefill_s
        self._number += 1
        heappush(self._next, (prompt.decode_begin_step + next_tokens, self._number, prompt))

    def _leave(self, prompt: QueuedPrompt) -> None:
        age = prompt.length_class
        self._counts[age] -= 1
        if self._counts[age]:
            self._inverses[age] -= prompt.per_expected_token
            self._began[age] -= prompt.prefill_s
        else:  # removes rounding errors
            self._inverses[age] = self._began[age] = 0.0


def per_token(inverse: float) -> float:
    """Return 1 over a length in tokens, for a length of at least LEAST_TOKENS."""
    return min(1.0 / LEAST_TOKENS, inverse)
