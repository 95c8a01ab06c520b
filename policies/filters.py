"""Filters: who may be asked at all. Each keeps candidates in order; run.py applies them one after another.

All are strict: when one leaves nobody, nobody is picked, and run.py can say which one it was. What then (wait, shed,
give up) is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import Filter, RetryFilter
from policies.model import Ask, Candidate


def available(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Neither ejected by health nor draining."""
    return [candidate for candidate in candidates if candidate.load.available]


@RetryFilter
def untried(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Has not failed this request yet: a retry goes elsewhere or nowhere."""
    return [candidate for candidate in candidates if candidate.endpoint.name not in ask.tried]


def below_cap(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Has room under its own concurrency cap; one that warms up may use all of it only if nobody else has any. Who was
    admitted goes over a cap rather than nowhere: a retry, and one whose place another gateway of the fleet took in the
    same moment."""
    below = [
        candidate
        for candidate in candidates
        if (load := candidate.load).in_flight < candidate.endpoint.max_concurrency and load.in_flight < load.ceiling
    ]
    if below:
        return below
    below = [candidate for candidate in candidates if candidate.load.in_flight < candidate.endpoint.max_concurrency]
    if below or not (ask.tried or any(candidate.load.others.shares for candidate in candidates)):
        return below
    return candidates


def fits_context(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the endpoints whose context is long enough for a prompt and its answer.

    Each prompt of a list and each of several answers needs a context of its own. The prompts of a list are assumed to
    be equally long.
    """
    request = ask.request
    needed = request.prompt_tokens // request.prompts + request.output_tokens // request.choices
    return [each for each in candidates if (most := each.endpoint.context_tokens) is None or most >= needed]


def serves_tenant(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Serves the request's tenant: an endpoint may be reserved for some tenants."""
    tenant = ask.request.tenant
    return [each for each in candidates if not (only := each.endpoint.tenants) or tenant in only]


@RetryFilter
def prefer_proven(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep, for a retry, the endpoints with a success since their last failure; all if none has."""
    return [candidate for candidate in candidates if candidate.load.is_proven] or candidates


def telling(filters: tuple[Filter, ...], candidates: Sequence[Candidate]) -> tuple[Filter, ...]:
    """Those of the filters that may have something to say of these candidates, whatever is asked."""
    idle = set()
    if all(each.endpoint.context_tokens is None for each in candidates):
        idle.add(fits_context)
    if not any(each.endpoint.tenants for each in candidates):
        idle.add(serves_tenant)
    return tuple(keep for keep in filters if keep not in idle) if idle else filters
