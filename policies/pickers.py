"""Pickers: from scores to one candidate. The only place where a decision may be random, through `ask.rng`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.model import Ask, Candidate


def best(ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
    """The highest score, ties at random: many gateways with the same view must not all choose the first."""
    top = max(scores)
    ties = [index for index, score in enumerate(scores) if score == top]
    return ties[0] if len(ties) == 1 else ties[int(ask.rng.random() * len(ties))]


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
