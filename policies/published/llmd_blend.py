"""The routing rule of llm-d's default profile: a weighted sum of four scores from 0 to 1.

The scores are for the cached prefix, the queue, free KV, and how long ago the endpoint last got a
prompt that was cached nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import NonNegative
from policies.policy_types import Policy, Scorer, WeightedScorer
from policies.published.rule_inputs import cached_tokens, kv_used, queued_requests
from policies.routing_types import Candidate, RoutingQuery


class LlmdBlend(PolicyParams, frozen=True):
    """A policy that adds four weighted scores, each from 0 to 1.

    The scores are: the cached share of the prompt, a short queue, free KV, and how long ago the
    endpoint last got a prompt that was cached nowhere.

    Source: the default profile of llm-d's inference scheduler until August 2026:
    prefix-cache-scorer 3, queue-scorer 2, kv-cache-utilization-scorer 2, no-hit-lru-scorer 2,
    max-score-picker.

    prefix_weight  weight of the cached share of the prompt
    queue_weight   weight of a short queue
    kv_weight      weight of free KV
    no_hit_weight  weight of the fourth score, which spreads prompts that are cached nowhere
    fresh_s        maximum age of scraped metrics in seconds
    """

    prefix_weight: NonNegative = 3.0
    queue_weight: NonNegative = 2.0
    kv_weight: NonNegative = 2.0
    no_hit_weight: NonNegative = 2.0
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        turns = ColdTurns()
        return Policy(
            name="llmd_blend",
            filters=DEFAULT_FILTERS,
            scorers=(
                WeightedScorer(cached_share, self.prefix_weight),
                WeightedScorer(short_queue(self.fresh_s), self.queue_weight),
                WeightedScorer(free_memory(self.fresh_s), self.kv_weight),
                WeightedScorer(turns.score, self.no_hit_weight),
            ),
            picker=turns.pick,
            reads_prefix=True,
        )


def cached_share(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
    """Return the cached share of the prompt, 0 to 1, at each candidate."""
    prompt = max(1, query.request.prompt_tokens)
    return [tokens / prompt for tokens in cached_tokens(query, candidates)]


def short_queue(fresh_s: float) -> Scorer:
    """Return a scorer that prefers endpoints with short queues.

    The shortest queue scores 1 and the longest 0. If all queues are equal, all score 1. Metrics
    older than `fresh_s` seconds are ignored.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        oldest = query.now - fresh_s
        queues = [queued_requests(candidate.load, oldest) for candidate in candidates]
        longest = max(queues)
        span = longest - min(queues)
        return [(longest - queue) / span for queue in queues] if span else [1.0] * len(queues)

    return score


def free_memory(fresh_s: float) -> Scorer:
    """Return a scorer whose score is the free share of KV memory, 0 to 1.

    Metrics older than `fresh_s` seconds are ignored.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        oldest = query.now - fresh_s
        return [1.0 - kv_used(candidate.load, oldest) for candidate in candidates]

    return score


class ColdTurns:
    """A scorer and picker that spreads prompts which are cached nowhere over all endpoints.

    The endpoint that has waited longest for such a prompt scores 1, the one that got the latest
    scores 0. If any endpoint has part of the prompt cached, all score the same. The object has
    state, so each policy needs its own.
    """

    __slots__ = ("_last", "_turn")

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[int, int] = {}

    def score(self, query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        if len(candidates) == 1 or any(cached_tokens(query, candidates)):
            return [0.5] * len(candidates)
        last, step = self._last, 1.0 / (len(candidates) - 1)
        turns = [last.get(candidate.load.slot, 0) for candidate in candidates]
        rank = {turn: rank for rank, turn in enumerate(sorted(turns))}
        return [1.0 - step * rank[turn] if turn else 1.0 for turn in turns]

    def pick(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
    ) -> int:
        chosen = pickers.best(query, candidates, scores)
        if not any(cached_tokens(query, candidates)):
            self._turn += 1
            self._last[candidates[chosen].load.slot] = self._turn
        return chosen
