"""How long answers turn out to be: what to expect of a request whose client gave no bound.

Lives here: a running mean per model, tenant and service class; and what is left of an answer under way. Not here: what
the client said (gateway/openai.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

MEMORY = 100  # answers that a mean looks back on
SEEN = 5  # answers before one of its own is believed more than its elders'
NOTHING = (0, 0.0)  # of what was not seen yet: answers, and their mean
SPREAD = (0.25, 0.5, 1.0, 1.5, 2.5)  # lengths over what was expected, before any was seen


class OutputLengths:
    """Expected output tokens, learnt from answers that ended. One writer: who ends requests.

    A tenant's class with few answers leans on the tenant, a tenant with few on the model: each of the three keeps a
    mean over its last MEMORY answers or so. At most `most` of them are kept; the one longest without news goes first.
    """

    __slots__ = ("_means", "_most")

    def __init__(self, most: int = 4096) -> None:
        if most < 3:
            raise ValueError(f"an answer is counted in three means, {most} are too few")
        self._most = most
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._means)

    def ended(self, model: str, tenant: str, slo: str, output_tokens: float, answers: int = 1) -> None:
        """Answers came to their own end, after so many tokens in the mean."""
        means = self._means
        for key in ((model,), (model, tenant), (model, tenant, slo)):
            seen, mean = means.pop(key, NOTHING)
            seen = min(MEMORY, seen + answers)
            means[key] = seen, mean + (output_tokens - mean) * min(1.0, answers / seen)
        while len(means) > self._most:
            del means[next(iter(means))]

    def expected(self, model: str, tenant: str, slo: str, bound: int | None = None) -> float | None:
        """Tokens to expect, never more than `bound`; None while nothing was seen of the model."""
        found: float | None = None
        for key in ((model,), (model, tenant), (model, tenant, slo)):
            seen, mean = self._means.get(key, NOTHING)
            if seen:
                own = min(1.0, seen / SEEN)
                found = mean if found is None else found + own * (mean - found)
        return found if found is None or bound is None else min(found, bound)


class Lately:
    """The last answers of one endpoint: how long they were over what had been expected of each."""

    __slots__ = ("_ordered", "_seen")

    def __init__(self) -> None:
        self._seen = deque(SPREAD, MEMORY)
        self._ordered: list[float] | None = None

    def ended(self, output_tokens: float, expected_tokens: float) -> None:
        """An answer is whole."""
        self._seen.append(output_tokens / max(1.0, expected_tokens))
        self._ordered = None

    def left(self, made_tokens: float, expected_tokens: float, share: float) -> float:
        """Tokens to come of an answer that has so many, if `share` (0 to 1) of all that came as far end before it.

        One that is longer than all that were seen is expected to become twice as long.
        """
        ordered = self._ordered
        if ordered is None:
            ordered = self._ordered = sorted(self._seen)
        expected = max(1.0, expected_tokens)
        shorter = bisect_right(ordered, made_tokens / expected)
        if shorter == len(ordered):
            return max(1.0, made_tokens)
        return ordered[shorter + int(share * (len(ordered) - shorter))] * expected - made_tokens
