"""Estimates a request's cost and its earliest first token in one pass over the candidates.

Reads the forecast of EndpointLoad. The estimate is used by admission; it neither picks an endpoint
nor decides whether the request may enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, RoutingQuery


class CostEstimate(msgspec.Struct, frozen=True):
    """What one request would cost a pool, and how soon its first token could come, for admission.

    ttft_s         seconds to the first token, queue included, at the endpoint where it comes
                   earliest; inf if no endpoint is available
    queue_s        seconds of queue, as a mean over all available candidates
    prefill_s      seconds to compute the prompt where that is quickest, without any queue
    decode_s       seconds of that endpoint's time that the answer uses up (`decode_work_s`)
    cached_tokens  largest number of prompt tokens that any candidate is believed to have cached
    count          number of available candidates
    """

    ttft_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    count: int

    @property
    def work_s(self) -> float:
        """Return the seconds of an endpoint's time that the request takes, decoding included."""
        return self.prefill_s + self.decode_s


def remaining_ttft_s(query: RoutingQuery) -> float:
    """Return the seconds left of the request's TTFT budget; negative if the budget is used up."""
    return (query.request.arrived_s or query.now) + query.request.slo.ttft_s - query.now


def estimate_cost(query: RoutingQuery, candidates: Sequence[Candidate]) -> CostEstimate:
    """Estimate what a request costs at these endpoints, and how soon its first token can come.

    Admission uses this to decide whether the request may enter. It takes O(candidates) time.
    """
    request, cached, now = query.request, query.cached_by_slot, query.now
    prompt, slots = request.prompt_tokens, len(query.cached_by_slot)
    earliest = cheapest = inf
    queues, most_cached, count, best = 0.0, 0, 0, None
    for candidate in candidates:
        load = candidate.load
        if not load.is_available:
            continue
        cached_here = cached[load.slot] if load.slot < slots else 0
        missing = prompt - cached_here if cached_here < prompt else 1
        own_s = load.fixed_ttft_s + missing * (
            load.prefill_s_per_token + load.attention_s_per_pair * (cached_here + missing / 2)
        )
        count += 1
        backlog = load.prefill_done_at - now
        if backlog > 0.0:
            queues += backlog
        else:
            backlog = 0.0
        if backlog + own_s < earliest:
            earliest = backlog + own_s
        if own_s < cheapest:
            cheapest, best = own_s, load
        if cached_here > most_cached:
            most_cached = cached_here
    if best is None:
        return CostEstimate(inf, inf, 0.0, 0.0, 0, 0)
    decode_s = decode_work_s(best, prompt, request.output_tokens)
    return CostEstimate(earliest, queues / count, cheapest, decode_s, most_cached, count)


def decode_work_s(load: EndpointLoad, prompt_tokens: int, output_tokens: int) -> float:
    """Return how many seconds of an endpoint's time the generation of an answer uses up.

    An answer runs beside others. It uses up its share of the steps, or its share of the KV memory
    times the seconds for which it occupies that memory, whichever is more.
    """
    context = prompt_tokens + output_tokens / 2
    steps_s = output_tokens * (
        load.decode_s_per_sequence + load.decode_s_per_context_token * context
    )
    if not load.kv_tokens:
        return steps_s
    return max(steps_s, output_tokens * load.decode_s_per_token * context / load.kv_tokens)
