"""Filters of a routing policy: each keeps the candidate endpoints that may serve a request.

Filters run one after another, and keep the order of the candidates. If none is left, the caller
decides whether the request waits, is refused or fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.endpoint_load import EndpointLoad
from policies.policy_types import Filter, RetryFilter
from policies.routing_types import Candidate, Role, RoutingQuery


def available(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates that health checks have not ejected and that do not drain."""
    # Nearly always all are; finding that out costs less than a new list.
    for candidate in candidates:
        load: EndpointLoad = candidate.load
        if not load.is_available:
            return [candidate for candidate in candidates if candidate.load.is_available]
    return candidates


@RetryFilter
def untried(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates on which this request has not failed yet."""
    return [
        candidate
        for candidate in candidates
        if candidate.endpoint.name not in query.failed_endpoints
    ]


def below_cap(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates below their concurrency cap, and prefer those below their soft cap.

    The soft cap is lower than the cap while an endpoint is in slow start or may be unhealthy. If
    all candidates are at their cap, two kinds of requests may still use them, because they were
    admitted before:

    - retries
    - requests that lost their place to a request of another gateway
    """
    for candidate in candidates:
        load: EndpointLoad = candidate.load
        in_flight = load.in_flight
        if in_flight >= load.soft_cap or in_flight >= candidate.endpoint.max_concurrency:
            return _with_room(query, candidates)
    return candidates


def _with_room(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    # Return the candidates below their cap, if possible below their soft cap, as `below_cap` does.
    #
    # Called if at least one candidate has reached a cap.
    with_room = [
        candidate
        for candidate in candidates
        if (load := candidate.load).in_flight < candidate.endpoint.max_concurrency
        and load.in_flight < load.soft_cap
    ]
    if with_room:
        return with_room
    with_room = [
        candidate
        for candidate in candidates
        if candidate.load.in_flight < candidate.endpoint.max_concurrency
    ]
    if with_room or not (
        query.failed_endpoints or any(candidate.load.peer_load.shares for candidate in candidates)
    ):
        return with_room
    return candidates


def fits_context(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates whose context limit fits the prompt and its expected answer.

    Each prompt of a list, and each of several answers, needs a context of its own. The prompts of a
    list are assumed to be equally long.
    """
    request = query.request
    needed = request.prompt_tokens // request.prompts + request.output_tokens // request.choices
    return [
        candidate
        for candidate in candidates
        if (limit := candidate.endpoint.context_tokens) is None or limit >= needed
    ]


def serves_tenant(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the endpoints that serve the request's tenant: not those reserved for other tenants."""
    tenant = query.request.tenant
    return [
        candidate
        for candidate in candidates
        if not (tenants := candidate.endpoint.tenants) or tenant in tenants
    ]


def prefer_room_to_decode(
    query: RoutingQuery, candidates: Sequence[Candidate]
) -> Sequence[Candidate]:
    """Keep the decode endpoints that can take a prompt's KV at once, or all if none can."""
    return [each for each in candidates if has_room_to_decode(each, query)] or candidates


def has_room_to_decode(candidate: Candidate, query: RoutingQuery) -> bool:
    """Return whether KV that is sent to a decode endpoint need not wait for memory there.

    Waits of endpoints that only decode do not matter: they keep no KV for other endpoints.
    """
    is_general = candidate.endpoint.role is Role.BOTH
    return not is_general or candidate.load.free_kv_tokens >= query.request.prompt_tokens


@RetryFilter
def prefer_proven(query: RoutingQuery, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the candidates whose last result was a success, or that have had no failure yet.

    If there is none, keep all candidates.
    """
    return [candidate for candidate in candidates if candidate.load.is_proven] or candidates


def applicable(filters: tuple[Filter, ...], candidates: Sequence[Candidate]) -> tuple[Filter, ...]:
    """Return those of the filters that may remove one of these candidates for some request.

    The caller can skip the others, which keep all candidates.
    """
    no_effect = set()
    if all(candidate.endpoint.context_tokens is None for candidate in candidates):
        no_effect.add(fits_context)
    if not any(candidate.endpoint.tenants for candidate in candidates):
        no_effect.add(serves_tenant)
    if all(candidate.endpoint.role is not Role.BOTH for candidate in candidates):
        no_effect.add(prefer_room_to_decode)
    return (
        tuple(filter_ for filter_ in filters if filter_ not in no_effect) if no_effect else filters
    )
