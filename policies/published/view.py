"""What published rules look at, read from a candidate: cached prefix, requests that queue, KV in use, predicted TTFT.

Their routers read the engine's metrics many times a second; here a scrape is seconds old and our own bookings are
instant. So what is booked counts, and a fresh scrape adds what others have sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.load import EndpointLoad
from policies.model import Ask, Candidate


def held(ask: Ask, candidates: Sequence[Candidate]) -> list[int]:
    """Tokens of this prompt that each candidate is believed to hold."""
    cached, known = ask.cached, len(ask.cached)
    if not any(cached):
        return [0] * len(candidates)
    return [
        cached[slot] if slot < known else 0
        for slot in [candidate.load.slot for candidate in candidates]
    ]


def is_fresh(load: EndpointLoad, oldest: float) -> bool:
    """Whether the engine's own view was scraped at `oldest` or later."""
    return load.scraped_at is not None and load.scraped_at >= oldest


def queued(load: EndpointLoad, oldest: float) -> int:
    """Requests there without a first token: ours that are booked, and strangers that a fresh scrape saw waiting."""
    ours = load.in_flight - load.decoding
    if load.strangers and load.waiting and is_fresh(load, oldest):
        return ours + min(load.strangers, load.waiting)
    return ours


def kv_used(load: EndpointLoad, oldest: float) -> float:
    """Share of KV memory in use, 0 to 1: what our bookings lock, or a fresh scrape if that says more; 0 if unknown."""
    booked = min(1.0, load.kv_booked / load.kv_tokens) if load.kv_tokens else 0.0
    if load.kv_usage is not None and load.kv_usage > booked and is_fresh(load, oldest):
        return load.kv_usage
    return booked


def prefill_s(load: EndpointLoad, new: int, cached: int) -> float:
    """Seconds that computing so many tokens behind so many cached ones takes, by the endpoint's hardware alone.

    Published predictors are made offline, one for all engines of a kind. What is learnt of single endpoints is left
    out here on purpose: among equals, the least of many noisy estimates is the most mistaken one, and all go there.
    """
    shape = load.belief.shape
    return new * (shape.token_s + shape.wire_s + shape.pair_s * (cached + 0.5 * new))


def ttfts(ask: Ask, candidates: Sequence[Candidate], cached: Sequence[int]) -> list[float]:
    """Predicted seconds to the first token at each candidate: its queue, and `prefill_s` of this prompt."""
    now, prompt, found = ask.now, ask.request.prompt_tokens, []
    for candidate, mine in zip(candidates, cached, strict=True):
        load = candidate.load
        seconds, wait = prefill_s(load, prompt - mine, mine), load.ready_at - now
        found.append(seconds + wait if wait > 0.0 else seconds)
    return found
