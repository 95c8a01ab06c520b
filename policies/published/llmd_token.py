"""The routing rule of llm-d's token-aware router: fewest tokens to prefill at a warm endpoint.

An endpoint is warm if it has most of the prompt cached. If warm endpoints are saturated, all
endpoints are considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies import pickers, scorers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import Fraction, NonNegative, Positive
from policies.policy_types import Filter, Policy, WeightedScorer
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery


class LlmdToken(PolicyParams, frozen=True):
    """A policy that picks the warm endpoint with the fewest tokens to prefill.

    Tokens to prefill are the queued ones plus the uncached tokens of this prompt. A warm endpoint
    has `warm_share` of the prompt cached. If the queues of warm endpoints are too much longer, all
    endpoints are considered. Source: llm-d's default since August 2026 (llm-d blog, 2026-08-17).
    Its R_peak (prompt tokens per second of one calibrated chunk) defaults to the learned speed of
    each endpoint.

    warm_share         an endpoint is warm if it has this share of the prompt cached
    patience_s         all endpoints are considered if warm queues are this many seconds longer
    peak_tokens_per_s  R_peak of the pool; None: the learned speed of each endpoint
    bound              the scarce resource. "prefill": pick the fewest tokens; "decode": pick the
                       fewest requests
    fresh_s            maximum age in seconds of scraped metrics, for external requests
    """

    warm_share: Fraction = 0.8
    patience_s: NonNegative = 18.0
    peak_tokens_per_s: Positive | None = None
    bound: Literal["prefill", "decode"] = "prefill"
    fresh_s: NonNegative = 5.0

    def build(self) -> Policy:
        return Policy(
            name="llmd_token",
            filters=(
                *DEFAULT_FILTERS,
                warm_until_saturated(self.warm_share, self.patience_s, self.peak_tokens_per_s),
            ),
            scorers=(
                WeightedScorer(
                    queued_and_new
                    if self.bound == "prefill"
                    else scorers.fewest_requests(self.fresh_s)
                ),
            ),
            picker=pickers.best,
            reads_prefix=True,
            reads_forecast=self.peak_tokens_per_s is None,
        )


def warm_until_saturated(
    warm_share: float, patience_s: float, peak_tokens_per_s: float | None
) -> Filter:
    """Return a filter that keeps the endpoints with most of the prompt cached ("warm").

    It keeps all endpoints if even the shortest queue of warm ones is `patience_s` seconds longer
    than the shortest queue elsewhere. The parameters are those of LlmdToken.
    """

    def warm(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        required = max(1.0, warm_share * query.request.prompt_tokens)
        cached = cached_tokens(query, candidates)
        warm_candidates = [
            candidate
            for candidate, tokens in zip(candidates, cached, strict=True)
            if tokens >= required
        ]
        if not warm_candidates or len(warm_candidates) == len(candidates):
            return candidates
        cold = min(
            _queue_s(candidate, peak_tokens_per_s)
            for candidate, tokens in zip(candidates, cached, strict=True)
            if tokens < required
        )
        return (
            warm_candidates
            if min(_queue_s(candidate, peak_tokens_per_s) for candidate in warm_candidates) - cold
            <= patience_s
            else candidates
        )

    return warm


def queued_and_new(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
    """Return each candidate's score: minus its prompt tokens to compute before the first token.

    These are the tokens of queued prompts and the uncached tokens of this prompt (Q + u).
    """
    prompt = query.request.prompt_tokens
    return [
        float(cached - prompt - candidate.load.prefill_tokens)
        for candidate, cached in zip(candidates, cached_tokens(query, candidates), strict=True)
    ]


def _queue_s(candidate: Candidate, peak_tokens_per_s: float | None) -> float:
    load = candidate.load
    return load.prefill_tokens * (
        1.0 / peak_tokens_per_s if peak_tokens_per_s else load.prefill_s_per_token
    )
