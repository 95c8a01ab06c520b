"""Estimates the length of answers for requests that have no limit.

OutputLengths has running means by model, tenant and service class. RecentLengths predicts how many
tokens a running answer will still generate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Sequence

DEFAULT_OUTPUT_TOKENS = 256
"""Expected length in tokens of a model's answers before the first answer has ended."""

MEMORY = 100  # number of answers a mean covers
SEEN = 5  # number of answers from which a mean has full weight over the more general one
NOTHING = (0, 0.0)  # number and mean before the first answer
SPREAD = (0.25, 0.5, 1.0, 1.5, 2.5)  # initial ratios of actual to expected length
CLASSES = 5
"""Number of classes of equal probability into which lengths are divided."""

LEAST_RATIO = 1e-3
"""Smallest ratio of actual to expected length that is recorded; shorter answers count as this."""

RECENT = 500
"""Number of a pool's last answers whose lengths count."""

MOST_HELD = 1000
"""Number of answers, running or ended, beyond which the oldest one holds back no others."""

QUANTILE_AGE = 0.02
"""Number of new lengths, as a share of all, from which quantiles are computed again."""

RUNNING = -1.0
# Placeholder for the ratio of an answer that has not ended. An answer that ended incomplete has the
# ratio 0.0.


InverseMoments = tuple[float, float, float, float]
"""The largest value, the mean, and the means of the squares and the cubes of 1 / ratio, over
classes of lengths."""


class OutputLengths:
    """Running means of answer lengths in tokens, by model, tenant and service class.

    A mean of few answers is mixed with the next more general mean. At most `most` means are stored;
    the least recently updated one is dropped first. Raises ValueError if `most` is below 3.
    """

    __slots__ = ("_means", "_most")

    def __init__(self, most: int = 4096) -> None:
        if most < 3:
            raise ValueError(
                "the number of means must be at least 3, because each answer counts in three; "
                f"got {most}"
            )
        self._most = most
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._means)

    def record(
        self, model: str, tenant: str, slo: str, output_tokens: float, answers: int = 1
    ) -> None:
        means = self._means
        for key in ((model,), (model, tenant), (model, tenant, slo)):
            count, mean = means.pop(key, NOTHING)
            count = min(MEMORY, count + answers)
            means[key] = count, mean + (output_tokens - mean) * min(1.0, answers / count)
        while len(means) > self._most:
            del means[next(iter(means))]

    def estimate(self, model: str, tenant: str, slo: str, bound: int | None = None) -> float | None:
        """Return the expected number of output tokens of an answer, at most `bound`.

        slo    name of the service class
        bound  the request's own limit; None: no limit

        Returns None if the model has no answers yet.
        """
        estimate: float | None = None
        for key in ((model,), (model, tenant), (model, tenant, slo)):
            count, mean = self._means.get(key, NOTHING)
            if count:
                weight = min(1.0, count / SEEN)
                estimate = mean if estimate is None else estimate + weight * (mean - estimate)
        return estimate if estimate is None or bound is None else min(estimate, bound)


class RecentLengths:
    """How the lengths of a pool's recent answers compare with the lengths that were expected.

    Each length is divided by its expected length. All endpoints of a pool share the object. If each
    had its own, an endpoint whose answers take long would count only its short ones, and would seem
    cheaper.

    Answers count in the order in which they began. In the order of their ends, all answers after a
    burst would seem short, because short answers end first. So an ended answer is held back until
    those that began before it have ended, or until MOST_HELD others have begun.
    """

    __slots__ = ("_begun", "_held", "_inverses", "_new", "_ordered", "_quantiles", "_ratios")

    def __init__(self) -> None:
        self._begun: deque[Hashable] = deque()
        self._held: dict[Hashable, float] = {}  # for each answer in _begun: its ratio, or RUNNING
        self._ratios, self._ordered = deque(SPREAD), list(SPREAD)
        self._quantiles: list[float] | None = None
        self._inverses: list[InverseMoments] = []
        self._new = 0  # number of lengths since the quantiles were computed

    def begin(self, answer: Hashable) -> None:
        """Record that an engine has begun this answer. Further calls have no effect."""
        if answer not in self._held:
            self._held[answer] = RUNNING
            self._begun.append(answer)
            if len(self._begun) > MOST_HELD:
                self._release()

    def end(self, answer: Hashable, output_tokens: float | None, expected_tokens: float) -> None:
        """Record that an answer has ended.

        output_tokens    its length; None: the answer is incomplete, or its length is unknown
        expected_tokens  the length that was expected
        """
        held, begun, ratio = self._held, self._begun, 0.0
        if output_tokens is not None:
            ratio = max(LEAST_RATIO, output_tokens / max(1.0, expected_tokens))
        if answer in held:
            held[answer] = ratio
            while begun and held[begun[0]] != RUNNING:
                self._release()
        elif ratio:
            self._record(ratio)

    def record(self, output_tokens: float, expected_tokens: float) -> None:
        """Record the length of a complete answer, without waiting for answers that began before
        it.
        """
        self.end(None, output_tokens, expected_tokens)

    def _release(self) -> None:
        # Count the oldest answer if it has ended. If it still runs, it counts at its end.
        ratio = self._held.pop(self._begun.popleft())
        if ratio > 0.0:
            self._record(ratio)

    def _record(self, ratio: float) -> None:
        self._ratios.append(ratio)
        insort(self._ordered, ratio)
        if len(self._ratios) > RECENT:
            del self._ordered[bisect_left(self._ordered, self._ratios.popleft())]
        self._new += 1
        if self._new >= QUANTILE_AGE * len(self._ratios):
            self._quantiles, self._new = None, 0

    def quantiles(self) -> Sequence[float]:
        """Return typical ratios of actual to expected answer length, from small to large.

        Recent ratios are sorted into CLASSES classes of equal size. The result has the median of
        each class.
        """
        if self._quantiles is None:
            ordered = self._ordered
            step = len(ordered) / CLASSES
            quantiles = [ordered[int((number + 0.5) * step)] for number in range(CLASSES)]
            self._quantiles, self._inverses = quantiles, _inverse_moments(quantiles)
        return self._quantiles

    def inverse_moments(self) -> Sequence[InverseMoments]:
        """Return, for each age of a running answer, statistics of 1 / ratio at the answer's end.

        A ratio is an answer's length divided by its expected length; `quantiles` returns typical
        ratios. Item k is for an answer that is already longer than k of them. It is (largest value,
        mean, mean square, mean cube) of 1 / ratio over the other typical ratios. The last item is
        for a ratio of 1.
        """
        self.quantiles()
        return self._inverses

    def remaining_tokens(
        self, generated_tokens: float, expected_tokens: float, share: float
    ) -> float:
        """Estimate from earlier answers how many tokens a running one will still generate.

        generated_tokens  tokens of the answer so far
        expected_tokens   its expected length
        share             the quantile (0 to 1) among earlier answers that were at least as long

        An answer longer than all earlier ones is expected to double in length.
        """
        ordered = self._ordered
        expected = max(1.0, expected_tokens)
        ended_earlier = bisect_right(ordered, generated_tokens / expected)
        if ended_earlier == len(ordered):
            return max(1.0, generated_tokens)
        return (
            ordered[ended_earlier + int(share * (len(ordered) - ended_earlier))] * expected
            - generated_tokens
        )


def _inverse_moments(ratios: Sequence[float]) -> list[InverseMoments]:
    moments, first, second, third = [(1.0, 1.0, 1.0, 1.0)], 0.0, 0.0, 0.0
    for count, ratio in enumerate(reversed(ratios), 1):
        inverse = 1.0 / ratio
        first += inverse
        second += inverse * inverse
        third += inverse * inverse * inverse
        moments.append((inverse, first / count, second / count, third / count))
    moments.reverse()
    return moments
