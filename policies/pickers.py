"""Pickers: from scores to one candidate. The only place where a decision may be random, through `ask.rng`."""

from __future__ import annotations

from collections.abc import Sequence

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
        top, last = max(scores), self._last_turn
        for candidate in candidates:
            if candidate.load.slot not in last:
                last[candidate.load.slot] = -ask.rng.random()
        in_play = [index for index, score in enumerate(scores) if score == top]
        chosen = min(in_play, key=lambda index: last[candidates[index].load.slot])
        self._turn += 1.0
        last[candidates[chosen].load.slot] = self._turn
        return chosen
