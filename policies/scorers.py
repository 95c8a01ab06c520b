"""Scorers of a routing policy: each rates how well a candidate endpoint would serve a request.

A score is a negative cost in tokens of work, so an idle endpoint scores 0. Each function here takes
a policy's parameters and returns a scorer without side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.endpoint_load import EndpointLoad
from policies.policy_types import Scorer
from policies.routing_types import Candidate, RoutingQuery

FULL_KV = 0.9
"""Share of KV memory in use (0 to 1) above which a new request may have to wait for memory."""

_TYPICAL_PROMPT = 1000.0
"""Number of prompt tokens that a sort key assumes for the request.

The scores multiply some costs by the prompt's length, which a sort key does not know.
"""


def constant() -> Scorer:
    """Return a scorer that rates all candidates 0, so that only the picker decides."""

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        return [0.0] * len(candidates)

    return score


def outstanding_work(output_weight: float, request_tokens: float, fresh_s: float) -> Scorer:
    """Return a scorer that prefers the endpoint with the least outstanding work.

        cost = prefill_tokens + output_weight * expected_tokens + request_tokens * in_flight
               + work of external requests

    The numbers of the gateways' own requests are exact and current, while scraped metrics are
    seconds old. So metrics are used only for external requests, which did not come through a
    gateway. Each external request is assumed to be as large as this request.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        own_size = (
            query.request.prompt_tokens
            + output_weight * query.request.output_tokens
            + request_tokens
        )
        return [
            -(
                load.prefill_tokens
                + output_weight * load.expected_tokens
                + request_tokens * load.in_flight
            )
            - own_size * external_requests(load, query.now, fresh_s)
            for load in (candidate.load for candidate in candidates)
        ]

    return score


def reserved_work(
    output_weight: float, request_tokens: float
) -> Callable[[Candidate, float], float]:
    """Return a sort key for endpoints by outstanding work: a function of candidate and time.

    The best candidate has the lowest key. Among candidates with equally many external requests
    (from outside the gateways), the order is that of the scorer `outstanding_work`.
    """

    def key(candidate: Candidate, now: float) -> float:
        load = candidate.load
        return (
            load.prefill_tokens
            + output_weight * load.expected_tokens
            + request_tokens * load.in_flight
        )

    return key


def requests_from_outside(load: EndpointLoad) -> int:
    """Return how many requests the engine had at its last scrape that came through no gateway.

    The age of that scrape does not matter here.
    """
    return load.external_requests


def fewest_requests(fresh_s: float) -> Scorer:
    """Return a scorer that prefers the endpoint with the fewest requests.

    External requests (from outside the gateways) are included if their scrape is at most `fresh_s`
    seconds old.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        now = query.now
        return [
            -float(load.in_flight + external_requests(load, now, fresh_s))
            for load in (candidate.load for candidate in candidates)
        ]

    return score


def uncached_work(
    harm_weight: float, patience_tokens: float, decode_weight: float, fresh_s: float
) -> Scorer:
    """Return a scorer that prefers the endpoint with the least prefill work before the first token.

        cost = Q + u + min(patience_tokens, harm_weight * n * w) + decode_weight * D
               + work of external requests

    - Q: reserved prefill tokens at the endpoint whose first token has not come yet
    - u: tokens of this prompt that the endpoint is not believed to have cached
    - n: requests in flight at the endpoint
    - w: redundant work, u minus the smallest u of all candidates
    - D: context and expected output tokens of requests that decode there

    Q + u alone is best for this request: the core rule of Llumnix (2026), of llm-d's token-aware
    router and of Mooncake (FAST'25).

    n * w is the harm to others. Each of the n requests shares its steps with the redundant prefill,
    for which LMetric (OSDI'26) multiplies new prefill by batch size. The weight is above 1 because
    redundant prefill also evicts prefixes that other requests need. So an idle fleet spreads
    requests, and a busy fleet does not compute prefixes twice.

    `patience_tokens` limits how much longer the queue at a cached prefix may be than its prefill
    elsewhere. When a popular prefix reaches the limit, another endpoint computes it, and from then
    on two endpoints have it. The decode term decides between nearly equal costs. An external
    request counts as large as this one. If the KV is more than 90 % full, a new request will
    probably wait for memory: this costs up to one more prompt.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        prompt, cached = query.request.prompt_tokens, query.cached_by_slot
        slots, oldest, most_cached = len(cached), query.now - fresh_s, 0
        held, scores = [], []
        for candidate in candidates:
            slot = candidate.load.slot
            tokens = cached[slot] if slot < slots else 0
            held.append(tokens)
            if tokens > most_cached:  # max() takes longer for the few candidates of most pools
                most_cached = tokens
        for index, candidate in enumerate(candidates):
            load: EndpointLoad = candidate.load
            cached_here = held[index]  # zip(strict=True) is a Python call in the compiled module
            cost = (
                load.prefill_tokens
                + prompt
                - cached_here
                + decode_weight * (load.decode_tokens + load.expected_tokens)
            )
            if cached_here < most_cached:
                harm = harm_weight * load.in_flight * (most_cached - cached_here)
                cost += harm if harm < patience_tokens else patience_tokens
            if load.scraped_at is not None and load.scraped_at >= oldest:
                usage = load.kv_usage
                pressure = 0.0 if usage is None or usage < FULL_KV else _pressure(load)
                cost += prompt * (load.external_requests + pressure)
            scores.append(-cost)
        return scores

    return score


def external_requests(load: EndpointLoad, now: float, fresh_s: float) -> int:
    """Return the number of external requests at an endpoint's last scrape; 0 if it is too old.

    A scrape is too old after `fresh_s` seconds. The number was computed when the metrics arrived. A
    comparison with the present `in_flight` would count own requests that have ended since.
    """
    if load.scraped_at is None or now - load.scraped_at > fresh_s:
        return 0
    return load.external_requests


def _pressure(load: EndpointLoad) -> float:
    # Return how full the KV memory was at the last scrape, 0 to 1.
    #
    # The result is 0 up to 90 % in use, and rises linearly to 1 at 100 %. It is 0 if unknown.
    if load.kv_usage is None or load.kv_usage < FULL_KV:
        return 0.0
    return (load.kv_usage - FULL_KV) * 10.0


def has_room_and_own_requests_only(load: EndpointLoad) -> bool:
    """Return whether an endpoint's metrics show free KV memory and no requests from outside.

    Requests from outside are those that came through no gateway.
    """
    return not load.external_requests and not _pressure(load)


def requests_in_flight(load: EndpointLoad) -> int:
    """Return the number of requests at an endpoint, which one more prefill would slow down."""
    return load.in_flight


def queued_work(decode_weight: float) -> Callable[[Candidate, float], float]:
    """Return a sort key for endpoints by prefill work: a function of candidate and time.

    The lowest key is best. Candidates with equally many requests in flight are in the same order as
    by the scorer `uncached_work`.
    """

    def key(candidate: Candidate, now: float) -> float:
        load = candidate.load
        return (
            load.prefill_tokens
            + decode_weight * (load.decode_tokens + load.expected_tokens)
            + _TYPICAL_PROMPT * (load.external_requests + _pressure(load))
        )

    return key


def decode_load(request_tokens: float, transfer_weight: float, fresh_s: float) -> Scorer:
    """Return a scorer that prefers endpoints with little decode work and little KV to transfer.

        cost = decode_tokens + expected_tokens + prefill_tokens + request_tokens * in_flight
               + transfer_weight * u

    u is the number of prompt tokens that the endpoint does not have cached. Each external request
    adds as many tokens as this prompt, if its scrape is at most `fresh_s` seconds old.
    """

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        prompt = query.request.prompt_tokens
        cached = query.cached_by_slot
        known = len(query.cached_by_slot)
        scores = []
        for candidate in candidates:
            load = candidate.load
            tokens = load.decode_tokens + load.expected_tokens + load.prefill_tokens
            cost = tokens + request_tokens * load.in_flight
            cost += transfer_weight * (prompt - (cached[load.slot] if load.slot < known else 0))
            scores.append(-cost - prompt * external_requests(load, query.now, fresh_s))
        return scores

    return score
