"""Pickers of a routing policy: each chooses one candidate endpoint by the scores.

A picker returns the index of the chosen candidate. Only pickers may use randomness (`query.rng`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf

from policies.endpoint_load import EndpointLoad
from policies.policy_types import Picker
from policies.routing_types import Candidate, RoutingQuery


def best(query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
    """Return the index of the candidate with the highest score.

    Ties are broken at random. Otherwise gateways with equal information would all choose the same
    endpoint.
    """
    top = scores[0]
    for score in scores:  # max() takes longer for the few candidates of most pools
        if score > top:
            top = score
    if scores.count(top) == 1:
        return scores.index(top)
    ties = [index for index, score in enumerate(scores) if score == top]
    return ties[int(query.rng.random() * len(ties))]


def best_with_tie_breakers(*costs: Callable[[EndpointLoad], float]) -> Picker:
    """Return a picker that chooses the candidate with the highest score, with rules for ties.

    Among candidates with equal scores, the lowest value of the first cost function wins, then that
    of the next one. Remaining ties are broken at random.
    """

    def pick(query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        top = max(scores)
        tied = [index for index, score in enumerate(scores) if score == top]
        for cost in costs:
            if len(tied) == 1:
                break
            costs_left = [cost(candidates[index].load) for index in tied]
            least = min(costs_left)
            tied = [
                index
                for index, cost_here in zip(tied, costs_left, strict=True)
                if cost_here == least
            ]
        return tied[0] if len(tied) == 1 else tied[int(query.rng.random() * len(tied))]

    return pick


def better_of_two(
    query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
) -> int:
    """Draw two candidates at random, and return the index of the better one (Mitzenmacher 2001)."""
    first = int(query.rng.random() * len(scores))
    if len(scores) == 1:
        return first
    second = int(query.rng.random() * (len(scores) - 1))
    second += second >= first
    return second if scores[second] > scores[first] else first


def softmax(temperature: float) -> Picker:
    """Return a picker that draws a candidate with a probability proportional to exp(score /
    temperature).

    A temperature of 0 always chooses the best candidate. Scores are first scaled so that they span
    a range of 1. Raises ValueError if the temperature is negative.
    """
    if temperature < 0:
        raise ValueError(f"the softmax temperature must be 0 or more, not {temperature}")
    if temperature == 0:
        return best

    def pick(query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        top = max(scores)
        span = (top - min(scores)) * temperature or 1.0
        weights = [exp((score - top) / span) for score in scores]
        drawn = query.rng.random() * sum(weights)
        for index, weight in enumerate(weights):
            drawn -= weight
            if drawn < 0:
                return index
        return len(scores) - 1

    return pick


class Rotation:
    """A round-robin picker: of the best candidates, it takes the least recently used.

    It stays fair when candidates are added or removed, unlike a counter modulo their number. It has
    state, so each policy needs a picker of its own. Candidates that were never picked come first,
    in random order, so that gateways started together do not all choose the same one.
    """

    __slots__ = ("_last_turn", "_turn")

    def __init__(self) -> None:
        self._turn = 0.0
        self._last_turn: dict[int, float] = {}

    def __call__(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
    ) -> int:
        last, top = self._last_turn, scores[0]
        try:
            turns = [last[candidate.load.slot] for candidate in candidates]
        except KeyError:
            self._add_new_slots(query, candidates)
            return self(query, candidates, scores)
        if scores.count(top) != len(scores):
            top = max(scores)
            turns = [
                turn if score == top else inf for turn, score in zip(turns, scores, strict=True)
            ]
        chosen = turns.index(min(turns))
        self._turn += 1.0
        last[candidates[chosen].load.slot] = self._turn
        return chosen

    def last_turn(self, candidate: Candidate, now: float) -> float:
        """Return the number of the pick that chose this candidate last, from 1; 0: none did."""
        return max(0.0, self._last_turn.get(candidate.load.slot, 0.0))

    def _add_new_slots(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self._last_turn.setdefault(candidate.load.slot, -query.rng.random())
