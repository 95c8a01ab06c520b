"""The routing rule of NVIDIA Dynamo's KV router: fewest blocks to prefill and blocks in use.

Cached blocks are subtracted from the blocks to prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import pickers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import NonNegative, PositiveCount
from policies.policy_types import Policy, Scorer, WeightedScorer
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery


class DynamoKv(PolicyParams, frozen=True):
    """A policy that picks the endpoint with the fewest blocks to prefill and blocks in use.

        cost = prefill_load_scale * max(0, (Q + n) / b - credit) + decode blocks
               + decode_active_request_weight * N
        credit = overlap_score_credit * cached / b
                 / (1 + overlap_score_credit_decay * excess queue / prompt)

    - Q: queued prompt tokens
    - n: tokens of this prompt
    - b: block size in tokens
    - N: number of active requests

    Source: the default selector of Dynamo's KV router (ai-dynamo/dynamo
    lib/kv-router/src/scheduling/selector/default.rs). There is no credit for host, disk or shared
    caches here. Decode blocks are the prompts in progress; a block that two requests share counts
    twice here, once there.

    overlap_score_credit          value of a cached block, in blocks to prefill
    overlap_score_credit_decay    how fast that value decays with the queue beyond the shortest one
    prefill_load_scale            weight of blocks to prefill relative to blocks in use
    decode_active_request_weight  fixed cost of an active request in blocks, added to its own blocks
    router_temperature            0 picks the lowest cost; above 0, costs are drawn by softmax
    block_size                    tokens per block
    """

    overlap_score_credit: NonNegative = 1.0
    overlap_score_credit_decay: NonNegative = 0.0
    prefill_load_scale: NonNegative = 1.0
    decode_active_request_weight: NonNegative = 0.0
    router_temperature: NonNegative = 0.0
    block_size: PositiveCount = 16

    def build(self) -> Policy:
        return Policy(
            name="dynamo_kv",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(blocks(self)),),
            picker=pickers.softmax(self.router_temperature),
            reads_prefix=True,
        )


def blocks(rule: DynamoKv) -> Scorer:
    """Return the scorer of Dynamo's rule: a candidate's score is its negative cost in KV blocks."""
    scale, per_request = rule.prefill_load_scale, rule.decode_active_request_weight
    credit = rule.overlap_score_credit
    decay = rule.overlap_score_credit_decay
    size = rule.block_size

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        loads = [candidate.load for candidate in candidates]
        prompt = query.request.prompt_tokens
        shortest = min(load.prefill_tokens for load in loads)
        fading = decay / max(1, prompt)
        scores = []
        for load, cached in zip(loads, cached_tokens(query, candidates), strict=True):
            value = credit / (1.0 + fading * (load.prefill_tokens - shortest))
            prefill = load.prefill_tokens + prompt - value * cached
            tokens = scale * prefill if prefill > 0 else 0.0
            tokens += load.decode_tokens + load.prefill_tokens
            scores.append(-tokens / size - per_request * load.in_flight)
        return scores

    return score
