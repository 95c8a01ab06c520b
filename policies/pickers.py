"""Pickers: from scores to one candidate. The only place where a decision may be random, through `ask.rng`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf

from policies.contract import Picker
from policies.load import EndpointLoad
from policies.model import Ask, Candidate


def best(ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
    """The highest score, ties at random: many gateways with the same view must not all choose the first."""
    top = max(scores)
    ties = [index for index, score in enumerate(scores) if score == top]
    return ties[0] if len(ties) == 1 else ties[int(ask.rng.random() * len(ties))]


def best_then(*costs: Callable[[EndpointLoad], float]) -> Picker:
    """The highest score; of those that share it the least by the first cost, then by the second, then any of them."""

    def pick(ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        top = max(scores)
        left = [index for index, score in enumerate(scores) if score == top]
        for cost in costs:
            if len(left) == 1:
                break
            each = [cost(candidates[index].load) for index in left]
            least = min(each)
            left = [index for index, mine in zip(left, each, strict=True) if mine == least]
        return left[0] if len(left) == 1 else left[int(ask.rng.random() * len(left))]

    return pick


def better_of_two(ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
    """The better of two different candidates drawn at random (Mitzenmacher 2001); the first of them on a tie."""
    first = int(ask.rng.random() * len(scores))
    if len(scores) == 1:
        return first
    second = int(ask.rng.random() * (len(scores) - 1))
    second += second >= first
    return second if scores[second] > scores[first] else first


def softmax(temperature: float) -> Picker:
    """A draw in which a score counts exp(score / temperature), scores scaled to a range of one; at 0 the best."""
    if temperature < 0:
        raise ValueError(f"a temperature is 0 or more, not {temperature}")
    if temperature == 0:
        return best

    def pick(ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        top = max(scores)
        span = (top - min(scores)) * temperature or 1.0
        weights = [exp((score - top) / span) for score in scores]
        drawn = ask.rng.random() * sum(weights)
        for index, weight in enumerate(weights):
            drawn -= weight
            if drawn < 0:
                return index
        return len(scores) - 1

    return pick


class Rotation:
    """Everybody in turn: among the best scores, the candidate whose last turn is longest ago.

    Unlike a counter modulo the number of candidates it stays exact when candidates come and go between requests.
    The one picker with a memory, owned by the policy value it was built for; a slot without a turn yet comes before
    all that had one, in random order, so that gateways started together do not walk in step.
    """

    __slots__ = ("_last_turn", "_turn")

    def __init__(self) -> None:
        self._turn = 0.0
        self._last_turn: dict[int, float] = {}

    def __call__(self, ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        last, top = self._last_turn, scores[0]
        try:
            turns = [last[candidate.load.slot] for candidate in candidates]
        except KeyError:
            self._welcome(ask, candidates)
            return self(ask, candidates, scores)
        if scores.count(top) != len(scores):
            top = max(scores)
            turns = [turn if score == top else inf for turn, score in zip(turns, scores, strict=True)]
        chosen = turns.index(min(turns))
        self._turn += 1.0
        last[candidates[chosen].load.slot] = self._turn
        return chosen

    def _welcome(self, ask: Ask, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self._last_turn.setdefault(candidate.load.slot, -ask.rng.random())
