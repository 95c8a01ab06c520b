"""Estimates the final lengths of the answers that an engine generates at present.

A new prefill delays all running answers. Whether that makes an answer too slow depends on its final
length, over which the delay is spread, and on its earlier delays. The final length is unknown, but
it is more than what has been generated, and earlier answers show how lengths are distributed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from policies.engine.output_length import CLASSES, RecentLengths

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.queued_prompt import QueuedPrompt

LEAST_TOKENS = 8.0
"""Minimum assumed length of an answer in tokens. A prefill makes shorter ones late in any case."""

MOST_PER_TOKEN = 1.0 / LEAST_TOKENS

MOST_ENDED = 64
"""Number of ended answers, beside as many as are running, that the heap of ages may hold."""

AgeGroup = tuple[float, float, float, float, float, float, float, int]
"""Running answers of the same age: their expected number, 1 over the expected length of their
requests, the mean of `prefill_s` (EngineModel) at their first tokens, the moments of 1 over the
ratios that their lengths may still have (output_length.InverseMoments), and the age.

The largest of these is inf if it would make an answer shorter than LEAST_TOKENS: the moments do not
hold then.
"""

LengthGroup = tuple[float, float, float]
"""Running answers of about one final length: their expected number, 1 over that length in tokens,
and the mean of `prefill_s` (EngineModel) at their first tokens."""


class RunningAnswers:
    """The answers that one engine is generating, with an estimate of how long each will become.

    The estimate uses earlier answers. Their lengths, divided by the expected length, form CLASSES
    classes of equal probability. An answer that is already longer than k of these typical lengths
    has the age k. Its final length is then one of the other classes, each with the same
    probability.

    age_groups  the answers by age, as of the last `update`; never changed in place
    ratios      the length classes at that time (RecentLengths.quantiles)
    """

    __slots__ = (
        "_answers",
        "_began",
        "_counts",
        "_expected_tokens",
        "_inverses",
        "_is_current",
        "_lengths",
        "_next",
        "_number",
        "age_groups",
        "ratios",
    )

    def __init__(self, lengths: RecentLengths) -> None:
        self._lengths = lengths
        self._counts = [0] * (CLASSES + 1)  # number of running answers by age
        self._inverses = [0.0] * (CLASSES + 1)  # sums of 1 / expected length
        self._began = [0.0] * (CLASSES + 1)  # sums of the prefill seconds at first tokens
        # (step at which the answer reaches its next age, entry number, answer), as a heap
        self._next: list[tuple[float, int, QueuedPrompt]] = []
        self._number = 0
        self.age_groups: list[AgeGroup] = []
        self.ratios: Sequence[float] = ()
        # whether the groups are those of the answers, and the endpoint's numbers that they are for
        self._is_current, self._answers, self._expected_tokens = False, 0, 0

    def add(self, prompt: QueuedPrompt) -> None:
        """Add an answer that the engine has begun: the first token of `prompt` has come."""
        if prompt.output_tokens > 1.0:
            self._enter(prompt, prompt.decode_begin_step)
            self._lengths.begin(prompt)
            self._is_current = False

    def remove(self, prompt: QueuedPrompt) -> None:
        """Remove an answer that has ended. Does nothing if it was not added."""
        if prompt.length_class >= 0:
            self._leave(prompt)
            prompt.length_class = -1
            self._is_current = False
            if len(self._next) > MOST_ENDED + 2 * sum(self._counts):
                self._drop_ended()

    def update(self, load: EngineLoad, steps: float, prefill_s: float) -> float:
        """Sort the running answers by age; return the decode step at which an age next changes.

        The age of an answer is how many of the typical lengths it has exceeded. The groups are
        stored in `age_groups`; the returned step is inf if no age will change. Requests without a
        first token count too. Other gateways' answers are assumed to be distributed like own ones.

        load       the engine's load, with its number of answers
        steps      number of decode steps of the engine so far
        prefill_s  total seconds of its steps with prompts
        """
        if self._next and self._next[0][0] <= steps:
            self._advance(steps)
        if not (
            self._is_current
            and self._answers == load.answers
            and self._expected_tokens == load.expected_tokens
        ):
            self.age_groups, self.ratios = self._group(load, prefill_s), self._lengths.quantiles()
            self._is_current, self._answers = True, load.answers
            self._expected_tokens = load.expected_tokens
        return self._next[0][0] if self._next else inf

    def restore(
        self, load: EngineLoad, age_groups: list[AgeGroup], ratios: Sequence[float]
    ) -> None:
        """Set the groups to earlier ones, so that a past decision can be explained.

        load        the load as it was then
        age_groups  the answers by age that `update` computed for it
        ratios      the typical lengths at that time, relative to the expected length
        """
        self.age_groups, self.ratios = age_groups, ratios
        self._is_current, self._answers = True, load.answers
        self._expected_tokens = load.expected_tokens

    def length_groups(self) -> Iterator[LengthGroup]:
        """Yield the running answers in groups of about the same estimated final length.

        A group is (expected number of answers, 1 / length in tokens, prefill seconds). The last is
        the engine's total of prefill seconds at the answers' first tokens, as a mean.
        """
        for count, inverse, began_s, _, _, _, _, age in self.age_groups:
            ratios = self.ratios[age:] or (1.0,)
            for ratio in ratios:
                yield count / len(ratios), per_token(inverse / ratio), began_s

    def _group(self, load: EngineLoad, prefill_s: float) -> list[AgeGroup]:
        answers, counts, groups = load.answers, self._counts, list[AgeGroup]()
        if not answers:
            return groups
        running, moments = sum(counts), self._lengths.inverse_moments()
        own = answers - load.peer_load.answers
        scale = answers / own if own > 0 and running else 1.0
        waiting = answers / scale - running
        if waiting > 0.0:
            most, first, second, third = moments[0]
            inverse = answers / (load.expected_tokens or 1)
            most = most if inverse * most <= MOST_PER_TOKEN else inf
            groups.append((scale * waiting, inverse, prefill_s, most, first, second, third, 0))
        for age, count in enumerate(counts if running else ()):
            if count:
                most, first, second, third = moments[age]
                inverse, began_s = self._inverses[age] / count, self._began[age] / count
                most = most if inverse * most <= MOST_PER_TOKEN else inf
                groups.append((scale * count, inverse, began_s, most, first, second, third, age))
        return groups

    def _advance(self, steps: float) -> None:
        # Move the answers that have reached their next age.
        following = self._next
        while following and following[0][0] <= steps:
            _, _, prompt = heappop(following)
            if prompt.length_class >= 0:
                self._leave(prompt)
                self._enter(prompt, steps)
                self._is_current = False

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
        # An answer longer than nearly all earlier ones is expected to double in length.
        if age == CLASSES:
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
    """Return `inverse`, which is 1 / (length in tokens), but at most 1 / LEAST_TOKENS."""
    return min(MOST_PER_TOKEN, inverse)
