"""llm-d's token-aware router: sticky until saturated, then least tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies import pickers, scorers
from policies.bounds import Amount, Positive, Share
from policies.contract import Filter, Policy, Weighted
from policies.model import Ask, Candidate
from policies.presets import ORDINARY, Preset
from policies.published.view import held


class LlmdToken(Preset, frozen=True):
    """Least prefill tokens queued and new, among warm endpoints unless their queues are too much longer than others'.

    llm-d's default since August 2026 (llm-d blog, 2026-08-17). Warm is who holds `warm_share` of the prompt. Its
    R_peak, prompt tokens per second of one calibrated chunk, is by default what is believed of each endpoint.

    warm_share         share of the prompt that must be cached to count as warm
    patience_s         seconds of queue that warm endpoints may be behind before all are asked
    peak_tokens_per_s  R_peak of the pool; None: of each endpoint, as learnt
    bound              what is scarce: prefill takes the fewest tokens, decode the fewest requests
    fresh_s            how old a scrape may be to tell of others' requests, seconds
    """

    warm_share: Share = 0.8
    patience_s: Amount = 18.0
    peak_tokens_per_s: Positive | None = None
    bound: Literal["prefill", "decode"] = "prefill"
    fresh_s: Amount = 5.0

    def build(self) -> Policy:
        return Policy(
            name="llmd_token",
            filters=(
                *ORDINARY,
                warm_until_saturated(self.warm_share, self.patience_s, self.peak_tokens_per_s),
            ),
            scorers=(
                Weighted(
                    queued_and_new
                    if self.bound == "prefill"
                    else scorers.fewest_requests(self.fresh_s)
                ),
            ),
            picker=pickers.best,
            reads_prefix=True,
            reads_beliefs=self.peak_tokens_per_s is None,
        )


def warm_until_saturated(
    warm_share: float, patience_s: float, peak_tokens_per_s: float | None
) -> Filter:
    """Those who hold most of the prompt, unless the shortest of their queues is `patience_s` longer than others'."""

    def warm(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        least = max(1.0, warm_share * ask.request.prompt_tokens)
        mine = held(ask, candidates)
        kept = [
            candidate for candidate, tokens in zip(candidates, mine, strict=True) if tokens >= least
        ]
        if not kept or len(kept) == len(candidates):
            return candidates
        cold = min(
            _queue_s(candidate, peak_tokens_per_s)
            for candidate, tokens in zip(candidates, mine, strict=True)
            if tokens < least
        )
        return (
            kept
            if min(_queue_s(each, peak_tokens_per_s) for each in kept) - cold <= patience_s
            else candidates
        )

    return warm


def queued_and_new(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
    """-(Q + u)"""
    prompt = ask.request.prompt_tokens
    return [
        float(cached - prompt - candidate.load.prefill_tokens)
        for candidate, cached in zip(candidates, held(ask, candidates), strict=True)
    ]


def _queue_s(candidate: Candidate, peak_tokens_per_s: float | None) -> float:
    load = candidate.load
    return load.prefill_tokens * (1.0 / peak_tokens_per_s if peak_tokens_per_s else load.token_s)
