"""The one loop of routing: filters keep, scorers rate, the picker chooses.

    pick(policy, ask, candidates)

Not here: any rule. A new one is a function in filters.py, scorers.py or pickers.py and a line in presets.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import Policy
from policies.model import Ask, Candidate, Pick


def pick(policy: Policy, ask: Ask, candidates: Sequence[Candidate]) -> Pick | None:
    """Who serves this request now; None if the filters leave nobody (see `refusal` for which one did)."""
    kept = candidates
    for keep in policy.filters if ask.tried else policy.first_filters:
        kept = keep(ask, kept)
    if not kept:
        return None
    scores = policy.score(ask, kept)
    index = policy.picker(ask, kept, scores)
    chosen, cached = kept[index], ask.cached
    slot = chosen.load.slot
    cached_tokens = cached[slot] if slot < len(cached) else 0
    return Pick(chosen, cached_tokens, scores[index], len(kept), policy.name, scores, kept)


def repicked(pick: Pick, candidate: Candidate, cached: Sequence[int]) -> Pick:
    """The same decision for another of the candidates that were considered."""
    slot = candidate.load.slot
    score = next((score for each, score in zip(pick.kept, pick.scores, strict=False) if each is candidate), pick.score)
    return Pick(
        candidate,
        cached[slot] if slot < len(cached) else 0,
        score,
        pick.considered,
        pick.reason,
        pick.scores,
        pick.kept,
    )


def refusal(policy: Policy, ask: Ask, candidates: Sequence[Candidate]) -> str:
    """The name of the filter that left nobody: why `pick` returned None. "no_candidates" if there was nobody at all."""
    kept = candidates
    if not kept:
        return "no_candidates"
    for keep in policy.filters:
        kept = keep(ask, kept)
        if not kept:
            return getattr(keep, "__name__", type(keep).__name__)
    raise ValueError(f"policy {policy.name} refuses nobody here")
