"""Inputs of published rules about a candidate: cached prefix, queue, KV in use, predicted TTFT.

The original routers read the engine's metrics many times per second. Here, scraped metrics are
seconds old, but the gateway always knows its own requests in flight. So the rules use the gateway's
own counts. Recent metrics only add the external requests, which did not come through a gateway.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, RoutingQuery


def cached_tokens(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[int]:
    """Return the tokens of this prompt that each candidate is believed to have cached."""
    cached, slots = query.cached_by_slot, len(query.cached_by_slot)
    if not any(cached):
        return [0] * len(candidates)
    return [
        cached[slot] if slot < slots else 0
        for slot in [candidate.load.slot for candidate in candidates]
    ]


def is_fresh(load: EndpointLoad, oldest: float) -> bool:
    """Return whether an endpoint's metrics are recent: read at the time `oldest` or later."""
    return load.scraped_at is not None and load.scraped_at >= oldest


def queued_requests(load: EndpointLoad, oldest: float) -> int:
    """Return the number of requests at an endpoint whose first token has not come yet.

    These are the gateways' own requests, plus the external ones that waited at the last scrape, if
    that was at the time `oldest` or later.
    """
    ours = load.in_flight - load.decoding
    if load.external_requests and load.waiting and is_fresh(load, oldest):
        return ours + min(load.external_requests, load.waiting)
    return ours


def kv_used(load: EndpointLoad, oldest: float) -> float:
    """Return the share of an endpoint's KV in use, 0 to 1; 0: unknown.

    It is the larger of the reserved share and the share at the last scrape, if that was at the time
    `oldest` or later.
    """
    reserved_share = min(1.0, load.kv_reserved / load.kv_tokens) if load.kv_tokens else 0.0
    if load.kv_usage is not None and load.kv_usage > reserved_share and is_fresh(load, oldest):
        return load.kv_usage
    return reserved_share


def prefill_s(load: EndpointLoad, new: int, cached: int) -> float:
    """Return the seconds that the hardware needs for `new` prompt tokens after `cached` ones.

    The endpoint's learned speed is left out on purpose, because published predictors are fitted
    offline, once per kind of engine. Besides, learned speeds are noisy: all requests would go to
    the endpoint with the most optimistic error.
    """
    shape = load.belief.shape
    return new * (shape.token_s + shape.wire_s + shape.pair_s * (cached + 0.5 * new))


def ttfts(
    query: RoutingQuery, candidates: Sequence[Candidate], cached: Sequence[int]
) -> list[float]:
    """Return the predicted seconds to the first token at each candidate: queue plus own prefill."""
    now, prompt, predicted = query.now, query.request.prompt_tokens, []
    for candidate, cached_tokens in zip(candidates, cached, strict=True):
        load = candidate.load
        seconds = prefill_s(load, prompt - cached_tokens, cached_tokens)
        wait = load.prefill_done_at - now
        predicted.append(seconds + wait if wait > 0.0 else seconds)
    return predicted
