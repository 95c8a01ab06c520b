"""llm-d's latency predictor: predicted TTFT and TPOT, behind a gate that keeps to warm caches."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from policies import pickers
from policies.bounds import Amount, Share
from policies.contract import Filter, Policy, Scorer, Weighted
from policies.latency import tpot_s
from policies.model import STANDARD, Ask, Candidate
from policies.presets import ORDINARY, Preset
from policies.published.view import held, ttfts

_BOTH_LATE, _TTFT_LATE, _TPOT_LATE, _IN_TIME = 0, 1, 2, 3


class LlmdPredictor(Preset, frozen=True):
    """Least predicted TTFT and TPOT, 0.8 to 0.2, of warm endpoints; with an SLO the fullest that still keeps it.

    llm-d / Gateway API Inference Extension, latency-scorer (llm-d blog, 2026-03-13). Its gradient-boosted trees are
    replaced by an analytic model, one for all engines of a kind as theirs is. Left out: its picks of one in a hundred
    among endpoints that miss the SLO, and its shedding, which is an admission's business. A request of the standard
    class has no SLO here.

    ttft_weight, tpot_weight  of the two latencies, scaled to the range among those compared
    warm_share                share of the prompt that must be cached to count as warm
    break_s                   seconds by which the best warm TTFT may exceed the best of all
    explore                   share of requests, by their ids, that ask everybody
    """

    ttft_weight: Amount = 0.8
    tpot_weight: Amount = 0.2
    warm_share: Share = 0.8
    break_s: Amount = 5.0
    explore: Share = 0.01

    def build(self) -> Policy:
        return Policy(
            name="llmd_predictor",
            filters=(*ORDINARY, affinity(self.warm_share, self.break_s, self.explore)),
            scorers=(Weighted(latency(self.ttft_weight, self.tpot_weight)),),
            picker=pickers.best,
            reads_prefix=True,
            reads_beliefs=True,
        )


def affinity(warm_share: float, break_s: float, explore: float) -> Filter:
    """Warm endpoints, if there are any and the wait there is not `break_s` longer; everybody for those who explore."""
    exploring = int(explore * 2**32)

    def warm(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        least, mine = max(1.0, warm_share * ask.request.prompt_tokens), held(ask, candidates)
        if not candidates or max(mine) < least or crc32(ask.request.id.encode()) < exploring:
            return candidates
        expected = _ttfts(ask, candidates, mine)
        kept = [index for index, tokens in enumerate(mine) if tokens >= least]
        if min(expected[index] for index in kept) - min(expected) > break_s:
            return candidates
        return [candidates[index] for index in kept]

    return warm


def latency(ttft_weight: float, tpot_weight: float) -> Scorer:
    """Tier plus fit: a whole number for what would be late (3: nothing), and 0 to 1 for how well it fits in the tier.

    In time, the least headroom fits best; late, the least delay does. Without an SLO everything is late by all of it.
    """

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        slo, prompt = ask.request.slo, ask.request.prompt_tokens
        ttft_slo, tpot_slo = (0.0, 0.0) if slo == STANDARD else (slo.ttft_s, slo.tpot_s)
        firsts = [seconds - ttft_slo for seconds in _ttfts(ask, candidates, held(ask, candidates))]
        steps = [tpot_s(candidate.load, prompt) - tpot_slo for candidate in candidates]
        if ttft_slo == 0.0:
            return [1.0 - bad for bad in _blend(firsts, steps, ttft_weight, tpot_weight)]
        scores, tiers = (
            [0.0] * len(candidates),
            [_tier(*late) for late in zip(firsts, steps, strict=True)],
        )
        for tier in set(tiers):
            members = [index for index, mine in enumerate(tiers) if mine == tier]
            lateness = [
                max(0.0, firsts[index]) if tier != _IN_TIME else -firsts[index] for index in members
            ]
            slowness = [
                max(0.0, steps[index]) if tier != _IN_TIME else -steps[index] for index in members
            ]
            for index, bad in zip(
                members, _blend(lateness, slowness, ttft_weight, tpot_weight), strict=True
            ):
                scores[index] = tier + 1.0 - bad
        return scores

    return score


def _ttfts(ask: Ask, candidates: Sequence[Candidate], cached: Sequence[int]) -> list[float]:
    """With what any request pays there as things stand: what the trees learn from running requests and KV in use."""
    found = ttfts(ask, candidates, cached)
    return [
        seconds + candidate.load.fixed_s
        for seconds, candidate in zip(found, candidates, strict=True)
    ]


def _tier(first_s: float, step_s: float) -> int:
    if first_s > 0.0:
        return _BOTH_LATE if step_s > 0.0 else _TTFT_LATE
    return _TPOT_LATE if step_s > 0.0 else _IN_TIME


def _blend(
    firsts: Sequence[float], steps: Sequence[float], ttft_weight: float, tpot_weight: float
) -> list[float]:
    """Weighted mean of both, each scaled to 0..1 over its range; what does not vary has no say."""
    low_first, low_step = min(firsts), min(steps)
    first_span, step_span = max(firsts) - low_first, max(steps) - low_step
    by_first = ttft_weight / first_span if first_span > 0.0 else 0.0
    by_step = tpot_weight / step_span if step_span > 0.0 else 0.0
    total = (ttft_weight if by_first else 0.0) + (tpot_weight if by_step else 0.0) or 1.0
    return [
        ((first - low_first) * by_first + (step - low_step) * by_step) / total
        for first, step in zip(firsts, steps, strict=True)
    ]
