"""The routing algorithm: filters keep candidates, scorers rate them, and a picker chooses one.

    pick(policy, query, candidates)

The rules are functions in filters.py, scorers.py and pickers.py. builtin_policies.py combines them.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.policy_types import Policy
from policies.prefix.prefix_match import PrefixMatch
from policies.routing_types import Candidate, Pick, RoutingQuery


def pick(
    policy: Policy, query: RoutingQuery, candidates: Sequence[Candidate], considered: int = 0
) -> Pick | None:
    """Choose the endpoint for a request by a policy.

    policy      the routing policy
    query       the request and what is known about it
    candidates  the endpoints to choose from; in a large pool, a shortlist
    considered  number of endpoints before the shortlist (Pick.candidate_count); 0: no shortlist

    Returns None if the filters keep no candidate. `rejecting_filter` then returns the filter's
    name.
    """
    remaining = candidates
    for filter_ in policy.filters if query.failed_endpoints else policy.first_attempt_filters:
        remaining = filter_(query, remaining)
    if not remaining:
        return None
    scores = policy.score(query, remaining)
    index = policy.picker(query, remaining, scores)
    candidate, cached = remaining[index], query.cached_by_slot
    slot = candidate.load.slot
    cached_tokens = cached[slot] if slot < len(cached) else 0
    if not considered and type(cached) is PrefixMatch and cached.wide:
        # The numbers must not change with the index. CandidateOrder does this for a shortlist.
        cached.look_up([candidate.load.slot for candidate in remaining])
        cached.forget_others()
    count = considered or len(remaining)
    return Pick(candidate, cached_tokens, scores[index], count, policy.name, scores, remaining)


def keep(
    policy: Policy, query: RoutingQuery, candidates: Sequence[Candidate]
) -> Sequence[Candidate]:
    """Return the candidates that may serve this request by the filters of the policy."""
    for filter_ in policy.filters if query.failed_endpoints else policy.first_attempt_filters:
        candidates = filter_(query, candidates)
    return candidates


def pick_of(
    reason: str,
    query: RoutingQuery,
    candidates: Sequence[Candidate],
    scores: Sequence[float],
    index: int,
) -> Pick:
    """Return the decision for the candidate with this index, for callers with their own scores."""
    candidate, cached = candidates[index], query.cached_by_slot
    slot = candidate.load.slot
    cached_tokens = cached[slot] if slot < len(cached) else 0
    return Pick(
        candidate, cached_tokens, scores[index], len(candidates), reason, scores, candidates
    )


def repick(pick: Pick, candidate: Candidate, cached: Sequence[int]) -> Pick:
    """Return a copy of a decision (Pick) that chooses another of its candidates.

    cached  number of prompt tokens that each endpoint is believed to have cached, by slot

    The reasons for the decision stay the same.
    """
    slot = candidate.load.slot
    score = next(
        (
            score
            for other, score in zip(pick.candidates, pick.scores, strict=False)
            if other is candidate
        ),
        pick.score,
    )
    return Pick(
        candidate,
        cached[slot] if slot < len(cached) else 0,
        score,
        pick.candidate_count,
        pick.reason,
        pick.scores,
        pick.candidates,
    )


def rejecting_filter(policy: Policy, query: RoutingQuery, candidates: Sequence[Candidate]) -> str:
    """Return the name of the filter that removed the last candidate.

    Returns "no_candidates" if there were no candidates at all. Raises ValueError if the filters
    keep a candidate.
    """
    remaining = candidates
    if not remaining:
        return "no_candidates"
    for filter_ in policy.filters:
        remaining = filter_(query, remaining)
        if not remaining:
            return getattr(filter_, "__name__", type(filter_).__name__)
    raise ValueError(
        f"no filter rejected this request: the filters of policy {policy.name} keep a candidate"
    )
