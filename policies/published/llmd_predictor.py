"""The routing rule of llm-d's latency predictor: lowest predicted latency of warm endpoints.

An endpoint is warm if it has most of the prompt cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.latency.expected_latency import tpot_s
from policies.param_types import Fraction, NonNegative
from policies.policy_types import Filter, Policy, Scorer, WeightedScorer
from policies.published.rule_inputs import cached_tokens, ttfts
from policies.routing_types import STANDARD, Candidate, RoutingQuery

_BOTH_LATE, _TTFT_LATE, _TPOT_LATE, _IN_TIME = 0, 1, 2, 3


class LlmdPredictor(PolicyParams, frozen=True):
    """A policy that picks the warm endpoint with the lowest predicted latency.

    A warm endpoint has most of the prompt cached. The latency is 0.8 TTFT + 0.2 TPOT. If the
    request has latency budgets, the policy picks the fullest endpoint that meets them; requests of
    the class "standard" have none here.

    Source: llm-d / Gateway API Inference Extension, latency-scorer (llm-d blog, 2026-03-13). An
    analytic model replaces its gradient-boosted trees; as there, one model serves all engines of a
    kind. Two parts are left out: picks of one in a hundred among endpoints that miss the budgets,
    and load shedding, which an admission policy does.

    ttft_weight  weight of the TTFT, which is scaled to its range among the candidates
    tpot_weight  weight of the TPOT, scaled in the same way
    warm_share   an endpoint is warm if it has this share of the prompt cached
    break_s      all endpoints are considered if the best TTFT of warm ones is this many seconds
                 longer than the best of all
    explore      share of requests, chosen by their ids, for which all endpoints are considered
    """

    ttft_weight: NonNegative = 0.8
    tpot_weight: NonNegative = 0.2
    warm_share: Fraction = 0.8
    break_s: NonNegative = 5.0
    explore: Fraction = 0.01

    def build(self) -> Policy:
        return Policy(
            name="llmd_predictor",
            filters=(*DEFAULT_FILTERS, affinity(self.warm_share, self.break_s, self.explore)),
            scorers=(WeightedScorer(latency(self.ttft_weight, self.tpot_weight)),),
            picker=pickers.best,
            reads_prefix=True,
            reads_forecast=True,
        )


def affinity(warm_share: float, break_s: float, explore: float) -> Filter:
    """Return a filter that keeps the endpoints with most of the prompt cached ("warm").

    The parameters are those of LlmdPredictor. All endpoints are kept in three cases:

    - no endpoint is warm
    - the wait at warm ones is more than `break_s` seconds longer
    - the request belongs to the share `explore`
    """
    exploring = int(explore * 2**32)

    def warm(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        required = max(1.0, warm_share * query.request.prompt_tokens)
        cached = cached_tokens(query, candidates)
        if not candidates or max(cached) < required or crc32(query.request.id.encode()) < exploring:
            return candidates
        expected = _ttfts(query, candidates, cached)
        warm_indices = [index for index, tokens in enumerate(cached) if tokens >= required]
        if min(expected[index] for index in warm_indices) - min(expected) > break_s:
            return candidates
        return [candidates[index] for index in warm_indices]

    return warm


def latency(ttft_weight: float, tpot_weight: float) -> Scorer:
    """Return a scorer by whether the first token (TTFT) and later tokens (TPOT) would be in time.

    The score is a tier plus a fit from 0 to 1. If everything is in time, the endpoint with the
    least spare time fits best. If something is late, the endpoint with the least delay fits best.
    Without latency budgets, everything counts as late.

    Tier 3: both TTFT and TPOT are in time. Tier 2: only TPOT is late. Tier 1: only TTFT is late.
    Tier 0: both are late.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        slo, prompt = query.request.slo, query.request.prompt_tokens
        ttft_slo, tpot_slo = (0.0, 0.0) if slo == STANDARD else (slo.ttft_s, slo.tpot_s)
        firsts = [
            seconds - ttft_slo
            for seconds in _ttfts(query, candidates, cached_tokens(query, candidates))
        ]
        steps = [tpot_s(candidate.load, prompt) - tpot_slo for candidate in candidates]
        if ttft_slo == 0.0:
            return [1.0 - penalty for penalty in _blend(firsts, steps, ttft_weight, tpot_weight)]
        scores = [0.0] * len(candidates)
        tiers = [_tier(*late) for late in zip(firsts, steps, strict=True)]
        for tier in set(tiers):
            members = [index for index, own in enumerate(tiers) if own == tier]
            lateness = [
                max(0.0, firsts[index]) if tier != _IN_TIME else -firsts[index] for index in members
            ]
            slowness = [
                max(0.0, steps[index]) if tier != _IN_TIME else -steps[index] for index in members
            ]
            for index, penalty in zip(
                members, _blend(lateness, slowness, ttft_weight, tpot_weight), strict=True
            ):
                scores[index] = tier + 1.0 - penalty
        return scores

    return score


def _ttfts(
    query: RoutingQuery, candidates: Sequence[Candidate], cached: Sequence[int]
) -> list[float]:
    # Return the predicted TTFT in seconds at each candidate, including its fixed cost at present.
    #
    # In the original, trees learn that fixed cost from running requests and KV use.
    predicted = ttfts(query, candidates, cached)
    return [
        seconds + candidate.load.fixed_ttft_s
        for seconds, candidate in zip(predicted, candidates, strict=True)
    ]


def _tier(first_s: float, step_s: float) -> int:
    if first_s > 0.0:
        return _BOTH_LATE if step_s > 0.0 else _TTFT_LATE
    return _TPOT_LATE if step_s > 0.0 else _IN_TIME


def _blend(
    firsts: Sequence[float], steps: Sequence[float], ttft_weight: float, tpot_weight: float
) -> list[float]:
    # Return the weighted mean of both latencies by candidate, each scaled to 0..1 over its range.
    #
    # A latency that is equal for all candidates has no weight.
    low_first, low_step = min(firsts), min(steps)
    first_span, step_span = max(firsts) - low_first, max(steps) - low_step
    by_first = ttft_weight / first_span if first_span > 0.0 else 0.0
    by_step = tpot_weight / step_span if step_span > 0.0 else 0.0
    total = (ttft_weight if by_first else 0.0) + (tpot_weight if by_step else 0.0) or 1.0
    return [
        ((first - low_first) * by_first + (step - low_step) * by_step) / total
        for first, step in zip(firsts, steps, strict=True)
    ]
