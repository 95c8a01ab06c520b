"""Scorers: how good each candidate would be. Scores are negative costs in tokens of work, so 0 is an idle endpoint.

Each factory takes its parameters once and returns a plain function; the functions read, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import Scorer
from policies.load import EndpointLoad
from policies.model import Ask, Candidate


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


def fewest_requests(fresh_s: float) -> Scorer:
    """Fewest requests: those in flight from here and the strangers of a fresh scrape."""

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        now = ask.now
        return [
            -float(load.in_flight + strangers(load, now, fresh_s))
            for load in (candidate.load for candidate in candidates)
        ]

    return score


def uncached_work(harm_weight: float, patience_tokens: float, decode_weight: float, fresh_s: float) -> Scorer:
    """Least prefill work before this request's first token, plus the harm that a wasted prefill does to the others.

    cost = Q + u + min(patience_tokens, harm_weight * n * w) + decode_weight * D, and what a fresh scrape adds

    Q   booked prefill tokens at the endpoint that have not led to a first token yet
    u   what this prompt would add: its tokens less those the endpoint is believed to hold
    n   requests in flight there
    w   waste: u less the smallest u of all candidates, work that another choice would have spared the fleet
    D   context and expected output tokens of requests in generation there

    `argmin Q + u` is the rule at the heart of Llumnix (2026) and of llm-d's token-aware router, and Mooncake's least
    TTFT (FAST'25) at a constant prefill rate: what is best for this request alone. `n * w` is what it does to the
    others: each of the n shares its steps with the wasted prefill (LMetric, OSDI'26, multiplies new prefill by batch
    size for the same reason), and its weight is above 1 because what it writes evicts what somebody else comes back
    for. So an idle fleet spreads freely, and a busy one does not compute things twice; on the Mooncake conversation
    trace this is worth 11 to 27 % more hits and up to 9 % less mean TTFT than `Q + u` alone.

    Patience bounds how much longer a queue in front of a cached prefix may be than the prefill of it elsewhere. One
    hot prefix therefore spills when its queue has grown that long, and the spill leaves a second copy that is just
    as attractive. The decode term breaks near ties. Strangers (requests an engine reports beyond ours) count as large
    as this one; above 90 % of KV held by running requests a newcomer soon waits for one of them to end.
    """

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        prompt, cached, known = ask.request.prompt_tokens, ask.cached, len(ask.cached)
        loads = [candidate.load for candidate in candidates]
        held = [cached[load.slot] if load.slot < known else 0 for load in loads]
        most, oldest = max(held), ask.now - fresh_s
        scores = []
        load: EndpointLoad
        for at, load in enumerate(loads):
            mine = held[at]  # zip() with arguments by name is a call that is looked up and packed anew where compiled
            cost = load.prefill_tokens + prompt - mine + decode_weight * (load.decode_tokens + load.expected_tokens)
            if mine < most:
                cost += min(patience_tokens, harm_weight * load.in_flight * (most - mine))
            if load.scraped_at is not None and load.scraped_at >= oldest:
                cost += prompt * (load.strangers + _pressure(load))
            scores.append(-cost)
        return scores

    return score


def strangers(load: EndpointLoad, now: float, fresh_s: float) -> int:
    """Requests at the endpoint that this gateway did not send, by a scrape not older than `fresh_s`; else 0.

    Counted when the scrape came: set against in_flight of now, our own requests ended since would look like strangers.
    """
    if load.scraped_at is None or now - load.scraped_at > fresh_s:
        return 0
    return load.strangers


def _pressure(load: EndpointLoad) -> float:
    """0 up to 90 % of KV in use, 1 at all of it, by the newest scrape."""
    return 0.0 if load.kv_usage is None or load.kv_usage < 0.9 else (load.kv_usage - 0.9) * 10.0


def decode_load(request_tokens: float, transfer_weight: float, fresh_s: float) -> Scorer:
    """Least work in generation: what slows every step of a newcomer's answer, and little KV to bring there.

    cost = decode_tokens + expected_tokens + prefill_tokens + request_tokens * in_flight + transfer_weight * u, and
    strangers as large as this request. u is what the endpoint does not hold of the prompt and would have to be sent.
    """

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        prompt, cached, known = ask.request.prompt_tokens, ask.cached, len(ask.cached)
        scores = []
        for candidate in candidates:
            load = candidate.load
            cost = load.decode_tokens + load.expected_tokens + load.prefill_tokens + request_tokens * load.in_flight
            cost += transfer_weight * (prompt - (cached[load.slot] if load.slot < known else 0))
            scores.append(-cost - prompt * strangers(load, ask.now, fresh_s))
        return scores

    return score
