"""Ranks smaller models as alternatives to a refusal, in the order of their cost.

`alternatives` returns which models could serve a request and at which price. Admission is in
policies/admission; the gateway reports the used model in the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.filters import fits_context, serves_tenant
from policies.pricing.admission_cost import estimate_cost, remaining_ttft_s
from policies.routing_types import Candidate, RoutingQuery


class ModelTier(msgspec.Struct, frozen=True):
    """A smaller model that may serve a request instead of a refusal.

    name        name of the model
    candidates  endpoints that serve it
    penalty     share of the request's value, 0 to 1, lost by using it
    """

    name: str
    candidates: tuple[Candidate, ...]
    penalty: float = 0.3


def alternatives(query: RoutingQuery, tiers: Sequence[ModelTier]) -> list[tuple[ModelTier, float]]:
    """Return the smaller models that could serve a request instead of a refusal, cheapest first.

    Each comes with its price, as a share of the request's value: penalty + (1 - penalty) * used.
    `used` is the share of the remaining TTFT budget that queue and prefill would take. Left out are
    models that would miss the budget, have no available endpoint, or accept no prompt of this
    length.

    query  the request
    tiers  the models
    """
    budget_s, priced = remaining_ttft_s(query), []
    for tier in tiers:
        estimate = estimate_cost(query, fits_context(query, serves_tenant(query, tier.candidates)))
        if estimate.count and 0.0 < budget_s >= estimate.ttft_s:
            priced.append((tier, tier.penalty + (1.0 - tier.penalty) * estimate.ttft_s / budget_s))
    return sorted(priced, key=lambda item: item[1])
