"""Compares the data-parallel ranks of engines whose ranks begin and end their steps together.

All ranks of such an engine wait for the slowest one, so a price differs little between them. What
matters is that no prompt is computed again at another rank. Therefore the least prefill work
decides between the ranks of one engine, as in the policy `prefix_aware`.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.builtin_policies import PrefixAware
from policies.policy_types import Scorer
from policies.routing_types import Candidate

Lags = list[float]
"""The additional tokens of work at each candidate, compared with the best rank of its engine."""


def prefill_work(fresh_s: float) -> Scorer:
    """Return the scorer of the policy `prefix_aware`, which needs no speeds: minus tokens of work.

    fresh_s  maximum age of a scrape that is used, in seconds
    """
    return PrefixAware(fresh_s=fresh_s).build().score


def lags_behind_best_rank(candidates: Sequence[Candidate], scores: Sequence[float]) -> Lags:
    """Return by how much each candidate's score is below that of the best rank of its engine.

    It is 0 for the best rank, and for an endpoint that does not step together with others.
    """
    engines = [id(candidate.load.lockstep_ranks or candidate.load) for candidate in candidates]
    best: dict[int, float] = {}
    for engine, score in zip(engines, scores, strict=True):
        best[engine] = max(score, best.get(engine, score))
    return [best[engine] - score for engine, score in zip(engines, scores, strict=True)]


def lags_behind_best(scores: Sequence[float]) -> Lags:
    """Return by how much each score is below the best one."""
    best = max(scores)
    return [best - score for score in scores]
