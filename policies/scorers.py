"""Scorers: how good each candidate would be. Scores are negative costs in tokens of work, so 0 is an idle endpoint.

Each factory takes its parameters once and returns a plain function; the functions read, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import Scorer
from policies.model import Ask, Candidate, EndpointLoad


def same() -> Scorer:
    """Everybody is as good as everybody: leaves the choice to the picker."""

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        return [0.0] * len(candidates)

    return score


def outstanding(output_weight: float, request_tokens: float, fresh_s: float) -> Scorer:
    """Least outstanding work: tokens and requests booked by this gateway, then what others sent.

    cost = prefill_tokens + output_weight * expected_tokens + request_tokens * in_flight + strangers' work

    Our own bookings are exact and instant, a scrape is seconds old: so the scrape only tells of strangers, the
    requests that the engine reports beyond ours. A stranger is taken to be as large as the request at hand.
    """

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        own_size = ask.request.prompt_tokens + output_weight * ask.request.output_tokens + request_tokens
        return [
            -(load.prefill_tokens + output_weight * load.expected_tokens + request_tokens * load.in_flight)
            - own_size * strangers(load, ask.now, fresh_s)
            for load in (candidate.load for candidate in candidates)
        ]

    return score


def uncached_work(decode_weight: float, fresh_s: float) -> Scorer:
    """Least prefill work before this request's first token, cached prefixes counted as done.

    cost = Q + u + decode_weight * (decode_tokens + expected_tokens) + strangers' work + memory pressure

    Q is the endpoint's booked prefill that has not produced a first token, u what this prompt would add to it: the
    prompt less what the endpoint is believed to hold. `argmin Q + u` is the rule at the heart of Llumnix (2026) and of
    llm-d's token-aware router, and Mooncake's minimal TTFT (FAST'25) with a constant prefill rate. It needs no
    threshold between "follow the cache" and "follow the load": a hot prefix draws requests until the queue in front
    of it costs as much as prefilling the prefix elsewhere, and the spill then leaves a second copy.

    The decode term breaks near ties towards endpoints with fewer tokens in generation, whose steps are shorter.
    Strangers are requests the engine reports beyond ours, each as large as this one is on average over the pool.
    Memory pressure: above 90 % of KV in use by running requests a newcomer soon waits for somebody to finish.
    """

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        prompt, cached, known = ask.request.prompt_tokens, ask.cached, len(ask.cached)
        scores = []
        for candidate in candidates:
            load = candidate.load
            held = cached[load.slot] if load.slot < known else 0
            cost = load.prefill_tokens + prompt - held + decode_weight * (load.decode_tokens + load.expected_tokens)
            if load.scraped_at is not None:
                cost += prompt * (strangers(load, ask.now, fresh_s) + _pressure(load, ask.now, fresh_s))
            scores.append(-cost)
        return scores

    return score


def strangers(load: EndpointLoad, now: float, fresh_s: float) -> int:
    """Requests at the endpoint that this gateway did not send, by a scrape not older than `fresh_s`; else 0."""
    if load.scraped_at is None or now - load.scraped_at > fresh_s:
        return 0
    return max(0, (load.running or 0) + (load.waiting or 0) - load.in_flight)


def _pressure(load: EndpointLoad, now: float, fresh_s: float) -> float:
    """0 up to 90 % of KV in use, 1 at all of it; 0 without a fresh scrape."""
    if load.kv_usage is None or load.scraped_at is None or now - load.scraped_at > fresh_s:
        return 0.0
    return max(0.0, (load.kv_usage - 0.9) * 10.0)
