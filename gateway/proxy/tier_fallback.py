"""Chooses a smaller model for a request that would otherwise be refused, if one is configured.

policies/pricing/model_tiers.py ranks the smaller models. Each model's admission queue decides
whether the request may enter.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.protocol.request.api_call import Call
from gateway.proxy.context_length import limits_output
from gateway.routes_and_snapshot import Route
from policies.pricing.model_tiers import ModelTier, alternatives
from policies.routing_types import RoutingQuery

# Maximum estimated tokens of a prompt, in percent of the context length that is left after exact
# counts are subtracted.
_ESTIMATE_PERCENT = 115


def pick_tier(
    endpoints: EndpointTable, routes: Mapping[str, Route], route: Route, call: Call
) -> Route | None:
    """Find a smaller model that can serve the request now, and return its route; None if none can.

    The request does not wait in a smaller model's queue, because that model's own requests go
    first.
    """
    if not route.overflow:
        return None
    overflow = [(name, penalty) for name, penalty in route.overflow if name in routes]
    tiers = [ModelTier(name, routes[name].candidates, penalty) for name, penalty in overflow]
    query = endpoints.build_query(call.request, None, ())
    for tier, _ in alternatives(query, tiers):
        smaller = routes[tier.name]
        if _can_serve(smaller, call) and smaller.pool_queue.try_enter(_discount(query, tier)):
            return smaller
    return None


def _can_serve(route: Route, call: Call) -> bool:
    # Return whether a smaller model's engines serve the API and have enough context length.
    #
    # Estimates of tokens that exceed the context by up to 15 % do not exclude the model: its engine
    # counts the tokens. Token ids and a limit of the answer's length are exact.
    if call.api.path in route.translated:
        return False  # the request was parsed for engines with this API, which these lack
    if route.context_tokens is None:
        return True
    request = call.request
    prompt_tokens = request.prompt_tokens // request.prompts
    output_tokens = request.output_tokens // request.choices
    estimated_tokens = prompt_tokens if call.estimated_tokens else 0
    estimated_tokens += 0 if limits_output(call) else output_tokens
    free_tokens = route.context_tokens - (prompt_tokens + output_tokens - estimated_tokens)
    return 100 * estimated_tokens <= _ESTIMATE_PERCENT * free_tokens


def _discount(query: RoutingQuery, tier: ModelTier) -> RoutingQuery:
    # Return the routing query for a smaller model, where the request has a lower weight.
    #
    # No Retry-After is computed for it, since a refusal by a smaller model is not final.
    slo = query.request.slo
    slo = replace(slo, weight=slo.weight * (1.0 - tier.penalty))
    return replace(query, request=replace(query.request, slo=slo), can_return=False)
